"""A large program is proved by a small one of its kind where each of its operations has the surroundings of one there, and a mistake anywhere is refuted."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec import structs, to_builtins

from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove import lanes, prove
from proctor.oracle.prove.lanes import spread
from proctor.oracle.prove.lanes.family import Family, World
from proctor.oracle.prove.lanes.reduced import Reduced, lift
from proctor.oracle.prove.lanes.skeleton import Skeleton
from proctor.oracle.prove.lanes.spread import Beside
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.tape import Node, Tape, collective
from proctor.oracle.prove.verdict import Verdict

sys.path.insert(0, str(Path(__file__).resolve().parents[5] / "benchmarks"))

from prove_models import Size, step

Both = tuple[Tape, Tape]


def world_of(rank: Tape, ranks: int) -> World:
    """Ranks along one axis, all like the first."""
    return World(Mesh(("pp", "dp", "tp"), (1, ranks, 1)), (1,), [(0, 0)], [Family(rank, [((0,), rank)])])


def skeleton(reference: Tape, rank: Tape, ranks: int) -> Skeleton:
    return Skeleton(reference, world_of(rank, ranks))


@pytest.fixture(scope="module")
def large() -> Both:
    program = step(Size(layers=4, dp=4, microbatches=4))
    return tape_of(program), tape_of(program, 0, 4)


@pytest.fixture(scope="module")
def less() -> tuple[Tape, list[Tape]]:
    program = step(Size(layers=3, dp=2, microbatches=3))
    return tape_of(program), [tape_of(program, rank, 2) for rank in range(2)]


@pytest.fixture(scope="module")
def small(less: tuple[Tape, list[Tape]]) -> Skeleton:
    return skeleton(less[0], less[1][0], 2)


def test_more_layers_ranks_and_microbatches_are_the_same_pieces(large: Both, small: Skeleton) -> None:
    assert skeleton(*large, 4).strange(small.colours) == ""


@pytest.mark.parametrize("change", ["operation", "left out", "reduction", "other input", "number"])
def test_one_operation_of_one_layer_and_microbatch_is_seen(large: Both, small: Skeleton, change: str) -> None:
    reference, rank = large
    tape = structs.replace(rank, nodes=[structs.replace(node, args=list(node.args), ins=list(node.ins)) for node in rank.nodes])
    tape.nodes[:] = changed(tape.nodes, change)
    assert "candidate" not in (said := skeleton(reference, tape, 4).strange(small.colours)) and "rank 0" in said


def changed(nodes: list[Node], change: str) -> list[Node]:
    """One operation in the middle of all is another one."""
    if change == "reduction":
        at = [k for k, n in enumerate(nodes) if collective(n.op)][7]
        nodes[at].detail = "max"
        return nodes
    inside = [k for k, n in enumerate(nodes) if n.module.startswith("layers.2.") and n.phase == "forward"]
    if change == "operation":
        nodes[next(k for k in inside[len(inside) // 2 :] if nodes[k].op == "aten.mul.Tensor")].op = "aten.div.Tensor"
    elif change == "left out":
        del nodes[next(k for k in inside[len(inside) // 2 :] if nodes[k].op == "aten.mul.Tensor")]
    elif change == "other input":
        one = nodes[next(k for k in inside[len(inside) // 2 :] if nodes[k].op == "aten.mm.default")]
        one.ins[1] = next(n for n in nodes if n.op == "aten.mm.default" and n.module.startswith("head")).ins[1]
    else:
        one = next(nodes[k] for k in inside[len(inside) // 2 :] if nodes[k].op == "aten.add.Tensor" and isinstance(nodes[k].args[1], float))
        one.args[1] = 3e-4
    return nodes


def test_more_experts_are_a_longer_sum() -> None:
    many, few = (tape_of(step(Size(layers=3, tp=tp, experts=True))) for tp in (4, 2))
    assert skeleton(many, many, 1).strange(skeleton(few, few, 1).colours) == ""


def test_a_sum_that_something_else_takes_on_its_way_is_seen() -> None:
    tape = tape_of(step(Size(layers=3, tp=4, experts=True)))
    nodes = [structs.replace(node, ins=list(node.ins)) for node in tape.nodes]
    adds = [k for k, node in enumerate(nodes) if node.op == "aten.add.Tensor" and node.module == "layers.1.inner" and node.phase == "forward"]
    target = next(k for k in range(adds[5], len(nodes)) if nodes[k].op == "aten.mul.Tensor")
    nodes[target].ins[0] = nodes[adds[5]].ins[0]  # what was added up so far, in the place of an expert's result
    few = tape_of(step(Size(layers=3, tp=2, experts=True)))
    assert skeleton(structs.replace(tape, nodes=nodes), tape, 1).strange(skeleton(few, few, 1).colours) != ""


def test_a_large_program_is_proved_by_a_small_one() -> None:
    size, other = Size(layers=4, dp=5), Size(layers=3, dp=2)
    verdict = prove(step(size), step(size), size.mesh, many=True, small=(step(other), step(other), other.mesh))
    assert verdict.verdict == "PROVED" and "random points" in verdict.why, str(verdict)
    assert any("stand for those of" in text for text in verdict.assumed)


def same(verdict: Verdict) -> dict[str, object]:
    """All of a verdict but how long it took."""
    return to_builtins(structs.replace(verdict, seconds={}))  # type: ignore[no-any-return]


def test_a_proof_that_is_made_beside_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    size, other = Size(layers=3, dp=5), Size(layers=3, dp=2)
    started: list[int] = []
    monkeypatch.setattr(spread, "Beside", lambda call: started.append(1) or Beside(call))
    alone, beside = (prove(step(size), step(size), size.mesh, many=True, jobs=jobs, small=(step(other), step(other), other.mesh)) for jobs in (1, 2))
    assert same(alone) == same(beside) and alone.verdict == "PROVED" and started == [1]
    assert alone.seconds.keys() == beside.seconds.keys()


def test_a_mesh_alone_is_proved_beside_as_well() -> None:
    program = step(Size(layers=1, dp=4))
    one, two = (prove(program, program, "dp=4", many=True, jobs=jobs, small="dp=2") for jobs in (1, 2))
    assert same(one) == same(two)


@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_proof_that_fails_beside_is_made_here(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    own = os.getpid()

    def fails(*args: object) -> object:
        assert os.getpid() != own
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError

    monkeypatch.setattr(lanes, "show", fails)
    size, other = Size(layers=3, dp=3), Size(layers=3, dp=2)
    verdict = prove(step(size), step(size), size.mesh, many=True, jobs=2, small=(step(other), step(other), other.mesh))
    assert verdict.verdict == "PROVED" and verdict.seconds["proof of the small program"] > 0


def test_nothing_runs_beside_where_there_is_nothing_to_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "Beside", None)
    size = Size(layers=1, dp=3)
    small = (step(size), step(size), size.mesh)
    assert prove(step(size), step(size), size.mesh, many=True, jobs=2).verdict == "EQUAL"
    assert prove(step(size), step(size), size.mesh, many=True, jobs=2, small=small, proof_s=0).verdict == "EQUAL"
    assert prove(step(size), step(size), size.mesh, many=True, jobs=1, small=small).verdict in ("EQUAL", "PROVED")


def test_without_a_proof_of_the_small_one_it_stays_equal(large: Both, less: tuple[Tape, list[Tape]]) -> None:
    verdict = Verdict("EQUAL")
    lift(verdict, large[0], world_of(large[1], 4), lambda: Reduced(*less, Plan("pp=1,dp=2,tp=1")), 0)
    assert verdict.verdict == "EQUAL" and "the small program is EQUAL" in verdict.why


def test_without_its_surroundings_in_the_small_one_it_stays_equal(large: Both, less: tuple[Tape, list[Tape]]) -> None:
    verdict = Verdict("EQUAL")
    tape = structs.replace(large[1], nodes=changed([structs.replace(node, args=list(node.args), ins=list(node.ins)) for node in large[1].nodes], "left out"))
    lift(verdict, large[0], world_of(tape, 4), lambda: Reduced(*less, Plan("pp=1,dp=2,tp=1")), 0)
    assert verdict.verdict == "EQUAL" and "the surroundings of" in verdict.why


@pytest.mark.parametrize(
    ("mistake", "size"), [("one layer", Size(layers=2, tp=2)), ("one microbatch", Size(layers=1, dp=2, microbatches=3)), ("one rank", Size(layers=1, dp=4)), ("last rank", Size(layers=1, dp=4))]
)
def test_a_mistake_in_one_place_is_refuted(mistake: str, size: Size) -> None:
    small = Size(layers=1, dp=min(size.dp, 2), tp=size.tp, microbatches=min(size.microbatches, 2))
    wrong = structs.replace(size, mistake=mistake)
    verdict = prove(step(size), step(wrong), size.mesh, many=True, small=(step(small), step(small), small.mesh))
    assert verdict.verdict == "DIFFERENT", str(verdict)
