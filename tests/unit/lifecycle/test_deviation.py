"""Which ranks are unlike the others, and along which mesh axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import write_run
from helpers.verdicts import Book, failed, violation

from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Support
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import judge
from proctor.verify.coverage import coverage
from proctor.verify.lifecycle.deviation import axis_of, deviation

MESH = {r: {"dp": r // 4, "pp": r // 2 % 2, "tp": r % 2} for r in range(8)}


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        (((0,), (1,)), "ranks 0 and 1 differ"),
        (((5,), (0, 1, 2, 3, 4, 6, 7)), "1 of 8: 5"),
        (((2,), (6, 7), (0, 1, 3, 4, 5)), "3 of 8: 2, 6–7"),
        (((0, 1), (2, 3)), "no majority of 4: ranks 0–1 against ranks 2–3"),
        (((0,), (1,), (2,)), "all 3 ranks differ"),
    ],
)
def test_the_majority_decides_where_there_is_one(sides, words):
    assert deviation(violation("a", sides=sides), 8, {}).words == words


@pytest.mark.parametrize(
    ("sides", "axis"),
    [
        (((0,), (4,)), "dp"),
        (((0,), (1,)), "tp"),
        (((1,), (3,)), "pp"),
        (((1, 3, 5, 7), (0, 2, 4, 6)), "tp"),  # all compared, and tp alone tells them apart
        (((4, 5, 6, 7), (0, 1, 2, 3)), "dp"),
        (((3,), (0, 1, 2)), "pp×tp"),
        (((0,), (9,)), ""),  # not known of all
    ],
)
def test_the_axis_is_the_one_along_which_ranks_disagree(sides, axis):
    assert axis_of(sides, MESH) == axis


def test_without_a_mesh_there_is_no_axis():
    assert axis_of(((0,), (1,)), {}) == axis_of(((0,), (1,)), {0: {}, 1: {}}) == ""


def test_scope_names_no_rank():
    assert deviation(violation("a", sides=((0,), (4,))), 8, MESH).scope == "dp"
    assert deviation(violation("a", sides=((0,), (4,))), 8, {}).scope == "group"
    assert deviation(violation("a", sides=((0,), (1,))), 2, {}).scope == "world"
    assert deviation(violation("a", places=[(1, 3)]), 8, MESH).scope == "world"


@pytest.mark.parametrize("ranks", [64, 4096])
def test_one_cause_on_many_ranks_is_one_trigger(ranks):
    sides = ((17, 18, 40), tuple(r for r in range(ranks) if r not in (17, 18, 40)))
    book = Book(ranks=ranks, coords={r: {"dp": r // 8, "tp": r % 8} for r in range(ranks)})
    for step in range(5, 10):
        grad = failed(violation("g", step, variable="ln.weight.grad", sides=sides))
        data = failed(violation("d", step, variable="ln.weight", sides=sides, expected="x" * 20_000))
        each = failed(violation("p", step, variable="ln.bias", places=[(step, r) for r in range(ranks)][:500]))
        book.step(step, grad, data, each)
    [notice] = book.told
    assert notice.details["ranks"] == f"3 of {ranks}: 17–18, 40; axis dp×tp"
    assert len(notice.text) < 4000 and len(notice.key) < 60
    assert book.book.incidents[0].minority == [17, 18, 40]


def test_the_relation_on_replicas_tells_which_ranks_agree(tmp_path: Path):
    """Real records of 16 ranks, of which two are unlike the others from step 2 on."""
    var = {"name": "fc.weight", "attr": "data", "module": "Net", "kind": "weight", "model": "lib.Model"}
    meta = {"dtype": "float32", "shape": "[4,4]", "requires_grad": True, "optimizer": "#0", "wrapper": "ddp"}
    step = {"fn": "torch.optim.Optimizer.step", "args": {"a": [{"O": "torch.optim.SGD", "a": {"name": "#0"}}], "k": {}}}
    processes = []
    for rank in range(16):
        held = [100 + s + (50 if rank in (3, 9) and s >= 2 else 0) for s in range(-1, 4)]
        states = [
            {"var": var, "step": s, "seq": s + 1, "call": s + 1, "edge": 1, "fp": fp, "meta": meta, "norm": 1.0}
            for s, fp in zip(range(-1, 4), held, strict=True)
        ]
        calls = [{**step, "step": s} for s in range(-1, 4)]
        processes.append({"rank": rank, "world": 16, "coords": {"dp": rank}, "calls": calls, "states": states})
    trace = Trace.load([write_run(tmp_path / "run", processes)])
    relation = registry()["consistent"]
    rules = [Invariant("c", h, ALWAYS, Support(1, 0, 1, 1), relation.say(h)) for h in relation.propose(trace)]
    found = [j.violation for j in judge(trace, relation, rules, coverage(trace)) if j.violation]
    assert found and all(v.sides == ((3, 9), tuple(r for r in range(16) if r not in (3, 9))) for v in found)
    assert deviation(found[0], 16, {p.rank: p.coords for p in trace.processes}).words == "2 of 16: 3, 9"


def test_the_relation_on_collectives_tells_which_ranks_agree():
    relation = registry()["agree"]
    example = {"_fn": "torch.distributed.all_reduce", "_item": 0, "_group": "g", "_seen": "s", "_caller": "c", "_sides": [[2], [0, 1]]}
    assert relation.detail(None, Hypothesis.of("agree", what="tensor"), example).sides == ((2,), (0, 1))
    assert relation.detail(None, Hypothesis.of("agree", what="turn"), example | {"_sides": None}).sides == ()
