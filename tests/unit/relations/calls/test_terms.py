"""What a backward is given against the last loss: parts of one batch share a divisor, and that is no fixed multiple yet."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.runs import write_run

from proctor.invariants.relations.habits import _terms
from proctor.invariants.trace import Trace

LOSSES = [3.0, 2.5, 2.8, 2.1, 2.6, 1.9, 2.2, 1.7]


@pytest.mark.parametrize(("tokens", "failed"), [([61, 61, 80, 80, 75, 75, 90, 90], []), ([61, 61, 61, 61, 70, 70, 66, 66], []), ([61] * 8, [2, 2, 3, 3])])
def test_parts_that_are_divided_by_the_tokens_of_their_batch(tmp_path: Path, tokens: list[int], failed: list[int]) -> None:
    trace = Trace.load([write_run(tmp_path / "run", [{"calls": [{"fn": "torch.Tensor.backward", "step": i // 2} for i in range(8)]}])])
    rows = pl.DataFrame(
        {"proc": [0] * 8, "step": [i // 2 for i in range(8)], "seq": range(1, 9), "what": "f:backward[0] beside loss()", "name": "loss()",
         "given": [loss / n for loss, n in zip(LOSSES, tokens, strict=True)], "number": LOSSES},
        schema_overrides={"proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32},
    )  # fmt: skip
    found = _terms.more(trace, rows)
    assert found.filter(~pl.col("passed"))["step"].to_list() == failed and found.filter("passed").height == (0 if failed else 7 - tokens.count(61) + 1)
