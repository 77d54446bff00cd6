"""Large meshes: a few ranks are run, all are judged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.oracle.prove_pipes import by_hand
from helpers.oracle.prove_programs import data_parallel, tensor_parallel, who

from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove import lanes, prove
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import Field
from proctor.oracle.prove.lanes.domain import Laned, packed, values
from proctor.oracle.prove.lanes.family import Family, World
from proctor.oracle.prove.lanes.machine import Integers, LaneMachine
from proctor.oracle.prove.lanes.needed import needed
from proctor.oracle.prove.lanes.routed import routed
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.tape import Array

sys.path.insert(0, str(Path(__file__).resolve().parents[5] / "benchmarks"))

from msgspec import structs
from prove_models import Size, step

Program = Callable[[], None]


@pytest.mark.parametrize(("make", "mesh", "ran"), [(tensor_parallel, "tp=6", "0, 1, 5 (3 of 6)"), (lambda: data_parallel(clip=True), "dp=6", "0, 1, 5 (3 of 6)")])
def test_ranks_that_were_not_run_are_judged_and_said(make: Callable[[], Program], mesh: str, ran: str) -> None:
    verdict = prove(make(), make(), mesh, many=True)
    assert verdict.verdict == "EQUAL", str(verdict)
    assert any(ran in text for text in verdict.assumed)


def test_stages_of_a_pipeline_are_programs_of_their_own() -> None:
    assert prove(by_hand(4, 2), by_hand(4, 2), "pp=2", many=True).verdict == "EQUAL"


@pytest.mark.parametrize("mistake", ["forward missing", "backward missing", "same shard"])
def test_a_wrong_program_is_refuted(mistake: str) -> None:
    assert prove(tensor_parallel(), tensor_parallel(mistake), "tp=6", many=True).verdict == "DIFFERENT"


@pytest.mark.parametrize("mistake", ["", "wrong data group", "gate not summed", "same rows"])
def test_a_mesh_of_three_axes_with_experts(mistake: str) -> None:
    size = Size(layers=2, pp=2, dp=3, tp=2, microbatches=2, experts=True)
    wrong = Size(layers=2, pp=2, dp=3, tp=2, microbatches=2, experts=True, mistake=mistake)
    assert prove(step(size), step(wrong), size.mesh, many=True).verdict == ("DIFFERENT" if mistake else "EQUAL")


@pytest.mark.parametrize(("mistake", "verdict"), [("", "EQUAL"), ("gate not summed", "DIFFERENT")])
def test_a_small_program_with_experts_is_judged_with_true_routing(mistake: str, verdict: str) -> None:
    size = Size(layers=1, dp=2, tp=2, experts=True)
    plan, alone = Plan(size.mesh), tape_of(step(size))
    ranks = [tape_of(step(structs.replace(size, mistake=mistake)), rank, 4) for rank in range(4)]
    assert decide(alone, ranks, plan, proof_s=0).verdict in ("UNPROVED", verdict)
    assert decide(alone, lanes._routed(lanes.Reduced(alone, ranks, plan)).candidate, plan, proof_s=0).verdict == verdict


def test_numbers_that_are_made_of_another_routing_are_not_kept() -> None:
    tape = tape_of(step(Size(layers=1, tp=2, experts=True)), 0, 2)
    at, node = next((k, n) for k, n in enumerate(tape.nodes) if n.op.startswith("aten.topk"))
    other = {(0, at): [None if v < 0 else tape.blocks[v] + 1 for v in node.values]}
    (now,) = routed([tape], other)
    assert now.nodes[at].values != node.values and now.nodes[at + 1] is tape.nodes[at + 1]
    chosen = next(w for w, v in zip(node.outs, node.values) if w is not None and v >= 0)
    nodes = list(tape.nodes)
    nodes.insert(at + 1, structs.replace(node, op="aten.add.Tensor", ins=[chosen], outs=[chosen], values=[node.values[-1]]))
    stale = structs.replace(tape, nodes=nodes)
    assert routed([stale], other) == [stale]


def test_a_rank_that_does_something_else_is_not_taken_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = data_parallel()

    def odd() -> None:
        rank, world = who()
        if rank == world - 1:
            torch.nn.Linear(4, 4).train()(torch.zeros(1, 4))
        usual()

    monkeypatch.setattr("proctor.oracle.prove.lanes.EVERY", 5)  # of more ranks not all are run
    verdict = prove(usual, odd, "dp=6", many=True)
    assert verdict.verdict == "UNPROVED" and "would have to be run" in verdict.why


def test_a_group_across_axes_is_said() -> None:
    def crossed() -> None:
        if dist.is_initialized():
            rank = dist.get_rank()
            group = dist.new_group([0, 3] if rank in (0, 3) else [1, 2], use_local_synchronization=True)
            model = torch.nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().backward()
            dist.all_reduce(model.weight.grad, group=group)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        else:
            model = torch.nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert prove(crossed, crossed, "dp=2,tp=2", many=True).verdict == "UNPROVED"


def test_an_operation_on_lanes_is_that_on_each() -> None:
    dice = np.random.default_rng(0)
    field = Field(1)
    laned = Laned(field, 2)
    a, b = (dice.integers(1, 2**31 - 1, (3, 4, n, m)) for n, m in ((5, 1), (1, 2)))
    laned.lanes = (5, 2)
    both = values(laned.mul(packed(a, 2), packed(b, 2)), 2)
    product = values(laned.matmul(packed(a, 2), packed(b.swapaxes(0, 1), 2)), 2)
    for i in range(5):
        for j in range(2):
            assert np.array_equal(both[..., i, j], field.mul(a[..., i, 0], b[..., 0, j]))
            assert np.array_equal(product[..., i, j], field.matmul(a[..., i, 0], b.swapaxes(0, 1)[..., 0, j]))
    few = values(laned.matmul(packed(a[:, :2], 2), packed(b[:2], 2)), 2)
    assert all(np.array_equal(few[..., i, j], field.matmul(a[:, :2, i, 0], b[:2, :, 0, j])) for i in range(5) for j in range(2))


def test_integers_of_floats_are_the_same_where_only_what_they_come_from_is_done() -> None:
    size = Size(layers=3, pp=2, dp=2, tp=2, microbatches=2, experts=True)
    small = lanes.Reduced(tape_of(step(size)), [tape_of(step(size), rank, 8) for rank in range(8)], Plan(size.mesh))
    found = []
    for part in (False, True):
        integers: Integers = {}
        machine = LaneMachine(lanes.apart(small), F64(), {}, integers)
        machine.only = needed(machine) if part else None
        machine.run()
        found.append((integers, machine))
    (whole, _), (part_of_it, machine) = found
    assert machine.only is not None
    assert whole.keys() == part_of_it.keys() and whole
    assert all(np.array_equal(a, b) for key in whole for a, b in zip(whole[key], part_of_it[key]) if a is not None and b is not None)
    assert sum(map(len, machine.only)) < 0.6 * sum(len(tape.nodes) for tape in small.candidate)
    assert not any(node.phase != "forward" and at in some for tape, some in zip(small.candidate, machine.only) for at, node in enumerate(tape.nodes))


def test_a_copy_is_not_what_it_was_made_of() -> None:
    def copied() -> None:
        model = torch.nn.Linear(3, 3)
        x = model(torch.ones(4, 3))
        other = x.detach().clone()
        other[1:].mul_(3.0)
        (x * other).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    tape = tape_of(copied)
    at, node = next((k, n) for k, n in enumerate(tape.nodes) if n.op.startswith("aten.clone"))
    (first,), (second,) = node.ins, node.outs
    assert second is not None
    shown: list[Array] = []
    machine = LaneMachine(World(Mesh(), (), [()], [Family(tape, [((), tape)])]), F64(), {}, {}, lambda r, k, views, n: shown.append(machine.read(0, first).copy()) if k in (at, at + 1) else None)
    machine.run()
    assert tape.nodes[at + 1].op.startswith("aten.mul_") and len(shown) == 2
    np.testing.assert_array_equal(shown[0], shown[1])
