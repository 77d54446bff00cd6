"""preserve: what modules carry is still theirs after a call that was given them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from helpers.runs import write_run

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.preserve import Preserve
from proctor.invariants.trace import Trace

SETUP = Hypothesis.of("preserve", fn="minilib.initialize")


def trace(path: Path, *calls: dict[str, str]) -> Trace:
    """One call of a library's set-up for each mapping: attribute → what became of it."""
    values: list[dict[str, Any]] = []
    for seq, changed in enumerate(calls, start=1):
        values.append({"kind": "attribute", "seq": seq, "place": "", "number": 20.0, "step": -1, "phase": "init"})
        values += [
            {"kind": "attribute", "seq": seq, "place": place, "meta": {"old": "3", "new": new}, "step": -1, "phase": "init"}
            for place, new in changed.items()
        ]
    rows = [
        {"fn": "minilib.initialize", "step": -1, "phase": "init", "site": f"train.py:{7 + i}"} for i in range(len(calls))
    ]
    return Trace.load([write_run(path, [{"calls": rows, "values": values}])])


def test_a_call_that_keeps_attributes_proposes_and_supports_the_rule(tmp_path: Path) -> None:
    seen = trace(tmp_path / "run", {})
    assert Preserve().propose(seen) == [SETUP]
    frame = Preserve().examples(seen, [SETUP]).frame
    assert frame["passed"].all() and frame.height >= 3, "one call that met twenty attributes is enough evidence"


def test_an_overwritten_attribute_fails_and_is_named(tmp_path: Path) -> None:
    seen = trace(tmp_path / "run", {}, {"layers.1.id": "0", "layers.2.id": "0"})
    failing = Preserve().examples(seen, [SETUP]).frame.filter(~pl.col("passed"))
    assert failing.height == 1, "one example a call, however much it changed"
    detail = Preserve().detail(seen, SETUP, failing.row(0, named=True))
    assert detail.function == "minilib.initialize" and detail.variable == "layers.1.id"
    assert "layers.1.id was 3 and became 0" in detail.seen and "layers.2.id" in detail.seen
    assert seen.sites[failing["site"][0]] == "train.py:8"


def test_a_function_that_always_changes_attributes_is_not_proposed(tmp_path: Path) -> None:
    assert Preserve().propose(trace(tmp_path / "run", {"temperature": "4"}, {"temperature": "5"})) == []


def test_a_run_without_such_calls_has_no_examples(tmp_path: Path) -> None:
    empty = Trace.load([write_run(tmp_path / "run", [{"calls": [{"fn": "torch.save"}]}])])
    assert Preserve().propose(empty) == []
    assert Preserve().examples(empty, [SETUP]).frame.height == 0
