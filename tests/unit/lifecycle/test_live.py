"""From the records of a run that goes on to what people are told: real relations, real windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.live.flushes import flushes
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.lifecycle import IncidentBook, Policy
from proctor.verify.live.online import OnlineChecker
from proctor.verify.notice import Notice

VAR = {"module": "Net", "kind": "weight", "model": "lib.Model"}
META = {"dtype": "float32", "shape": "[4,4]", "requires_grad": True, "optimizer": "#0", "wrapper": "ddp"}
UPDATE = {"fn": "torch.optim.Optimizer.step", "args": {"a": [{"O": "torch.optim.SGD", "a": {"name": "#0"}}], "k": {}}}


def rank_that_trains(rank: int, world: int, steps: int, unlike: range = range(0)) -> dict[str, Any]:
    """One of several replicas; in some steps its parameters are unlike those of the others."""
    calls: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    for step in range(-1, steps):
        calls.append({**UPDATE, "step": step} if step >= 0 else {"fn": "init", "step": -1})
        for i, name in enumerate(("fc.weight", "ln.weight")):
            value = 1000 + 10 * step + i + (100_000 * rank if step in unlike else 0)
            seq = len(calls)
            states.append(
                {"var": {**VAR, "name": name, "attr": "data"}, "step": step, "seq": seq, "call": seq, "edge": 1, "fp": value, "meta": META, "norm": 1.0}
            )  # fmt: skip
    return {"rank": rank, "world": world, "coords": {"dp": rank}, "calls": calls, "states": states}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    path = write_run(tmp_path_factory.mktemp("healthy") / "run", [rank_that_trains(r, 4, 12) for r in range(4)])
    return Pack(infer(Trace.load([path]), [registry()["consistent"]], strict=True)[0])


@pytest.mark.parametrize("together", [True, False])
def test_a_replica_that_differs_for_a_while_is_told_and_over_when_it_agrees_again(tmp_path: Path, pack: Pack, together: bool):
    ranks = [rank_that_trains(r, 4, 60, range(20, 25) if r == 2 else range(0)) for r in range(4)]
    checker = OnlineChecker([pack], relations={"consistent": registry()["consistent"]}, together=together)
    book = IncidentBook("job", "host", Policy(hold_s=0, clean=10))
    told: list[tuple[int, Notice]] = []
    for process, part, info, reached in flushes(write_run(tmp_path / "run", ranks)):
        checker.live.add(process, part, info, reached)
        notices = book.judged(checker.rounds(), ranks=4, coords={r: {"dp": r} for r in range(4)})
        told += [(checker.judged, n) for n in notices]
    assert [(step, n.action) for step, n in told] == [(20, "trigger"), (34, "resolve")]
    trigger = told[0][1]
    assert trigger.details["ranks"] == "1 of 4: 2; axis dp" and trigger.group == "dp"
    assert trigger.key.endswith(":dp") and trigger.step == 20
