"""`contain`: what a call contains, where a part of the run is held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations.contain import EventContain
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import Window, cut
from proctor.verify.checker import check

RELATION = EventContain()


def test_a_call_that_goes_on_behind_a_window_is_unknown(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    for step in range(0, 15, 3):
        calls.append({"fn": "lib.run_epoch", "step": step, "dur": 5_000_000})
        epoch = len(calls)
        calls += [{"fn": "lib.batch", "step": step + i, "parent": epoch} for i in range(3)]
        calls.append({"fn": "lib.evaluate", "step": step + 2, "parent": epoch})
    whole = Trace.load([write_run(tmp_path / "a", [{"calls": calls}])])
    rules = [r for r in infer(whole, [RELATION], strict=True)[0] if r.hypothesis["child"] == "lib.evaluate"]
    first = cut(whole, Window(-1, 10, reach=0))  # the fourth epoch is in its first step
    assert rules
    assert not check(first, [Pack(rules)], relations={"contain": RELATION}).violations
    assert check(replace(first, ends=True), [Pack(rules)], relations={"contain": RELATION}).violations
