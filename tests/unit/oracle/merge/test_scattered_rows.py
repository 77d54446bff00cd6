"""oracle/judging/rows.py: tensors whose rows are in another order, or in other calls, than the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net  # noqa: E402

from proctor.oracle import compare, trace, trace_reference  # noqa: E402
from proctor.oracle.judging.rows import counterparts  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict  # noqa: E402

RNG = np.random.default_rng(0)


def test_rows_are_found_again_but_for_rounding() -> None:
    rows = RNG.standard_normal((300, 8))
    order = RNG.permutation(300)
    found = counterparts(rows, rows[order] * (1 + 1e-3 * RNG.standard_normal((300, 8))))
    assert found is not None and np.array_equal(order[found], np.arange(300))


def test_rows_that_may_be_several_are_left_out() -> None:
    rows = RNG.standard_normal((10, 8))
    rows[3] = rows[7]
    found = counterparts(rows, rows[::-1])
    assert found is not None and [i for i, at in enumerate(found) if at < 0] == [3, 7]
    assert counterparts(np.repeat(rows[:1], 10, 0), np.repeat(rows[:1], 10, 0)) is None


def test_a_row_without_counterpart_leaves_nothing_to_compare() -> None:
    rows = RNG.standard_normal((10, 8))
    other = rows.copy()
    other[4] = RNG.standard_normal(8)
    assert counterparts(rows, other) is None
    other[4] = np.nan
    assert counterparts(rows, other) is None


def regrouped(folder: Path, dropped: int = 0, **wrong: Any) -> Verdict:
    """The reference takes 3 and 5 rows; the candidate all 8 at once, in another order."""
    rows = torch.from_numpy(RNG.standard_normal((8, 8)).astype(np.float32))
    model, other = Net(), Net(**wrong)

    def train(net: Net, *batches: Any) -> None:
        net.zero_grad()
        for batch in batches:
            net(batch).square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.01).step()

    trace_reference(lambda: train(model, rows[:3], rows[3:]), model, out=folder / "reference", samples=2)
    with trace(other, folder / "candidate"):
        train(other, rows[[6, 1, 4, 0, 7, 2, 5, 3]][dropped:])
    return compare(folder / "reference", folder / "candidate")


def test_an_expert_that_gets_its_tokens_otherwise(tmp_path: Path) -> None:
    same = regrouped(tmp_path / "same")
    assert same.verdict == "equivalent" and not same.unchecked
    activations = [t for t in same.tensors if t.kind in ("input", "output", "grad_input", "grad_output")]
    assert len(activations) == 20 and {t.layout for t in activations} == {"rows by content"}
    other = regrouped(tmp_path / "other", twist=1.001)
    assert other.first is not None and (other.first.kind, other.first.name, other.first.call) == ("input", "last", 0)


def test_where_a_row_is_missing_nothing_is_placed(tmp_path: Path) -> None:
    found = regrouped(tmp_path, dropped=1)
    assert found.verdict == "different" and "first.weight" in {t.name for t in found.tensors if t.kind == "main_grad" and t.verdict == "bad"}
    assert not any("rows by content" in t.layout for t in found.tensors)
