"""A job's state and data under the reference's names, and what a kept step says against what a reference computed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from proctor.invariants.capsule import Call, Capsule, Group, Print, Seen, Variable
from proctor.invariants.schema import StateFlag
from proctor.oracle.numbers.tolerance import Tolerance
from proctor.oracle.plans.plan import Plan
from proctor.oracle.replaying.data import (
    data_groups,
    is_model_call,
    loss_streams,
    model_streams,
)
from proctor.oracle.replaying.judge import _norms
from proctor.oracle.replaying.state import (
    State,
    borrow,
    hyperparameters,
    place_state,
)

FULL = np.arange(32, dtype=np.float32).reshape(8, 4)
BIAS = np.arange(4, dtype=np.float32)
SHAPES = {"up.weight": ("float32", (8, 4)), "bias": ("float32", (4,))}
Tensors = dict[tuple[int, str], np.ndarray[Any, Any]]


def parameter(name: str, values: np.ndarray[Any, Any], key: str = "") -> Variable:
    return Variable("parameter", name, "float32", values.shape, "cpu", Print(hash(values.tobytes()), 0), key=key or name)


def job(*ranks: dict[str, np.ndarray[Any, Any]]) -> tuple[dict[int, Capsule], Tensors]:
    """Capsules of ranks that hold these parameters."""
    capsules, tensors = {}, {}
    for rank, held in enumerate(ranks):
        capsules[rank] = Capsule(key="k", step=3, rank=rank, world=len(ranks), state=tuple(parameter(n, v) for n, v in held.items()))
        tensors |= {(rank, n): v for n, v in held.items()}
    return capsules, tensors


def placed(capsules: dict[int, Capsule], tensors: Tensors, plan: Plan | None = None) -> State:
    return place_state(SHAPES, capsules, lambda rank, key: tensors[rank, key], plan)


def test_replicas_behind_a_wrapper_are_one_whole() -> None:
    found = placed(*job(*[{"module.up.weight": FULL, "module.bias": BIAS}] * 2))
    assert not found.trouble and not found.notes
    assert np.array_equal(found.tensors["up.weight"], FULL) and [s.rank for s in found.shards["bias"]] == [0, 1]
    assert all(s.sure for s in found.shards["up.weight"])


def test_replicas_that_differ_are_no_state() -> None:
    found = placed(*job({"up.weight": FULL, "bias": BIAS}, {"up.weight": FULL + 1, "bias": BIAS}))
    assert "ranks 0 and 1 hold other values" in found.trouble[0] and not found.apart
    capsules, tensors = job({"up.weight": FULL, "bias": BIAS}, {"up.weight": FULL + 1, "bias": BIAS})
    assert "are replicas" in placed(capsules, tensors, Plan("tp=2").replicate("up.weight")).apart[0]
    for axis, sure in (("dp", True), ("ep", False)):
        capsules = {r: msgspec.structs.replace(c, coords={axis: r}) for r, c in capsules.items()}
        assert bool(placed(capsules, tensors).apart) is sure


def test_consecutive_parts_are_a_guess_and_a_plan_is_none() -> None:
    whole = job({"up.weight": FULL[:4], "bias": BIAS}, {"up.weight": FULL[4:], "bias": BIAS})
    found = placed(*whole)
    assert np.array_equal(found.tensors["up.weight"], FULL) and not any(s.sure for s in found.shards["up.weight"])
    assert "no plan says how" in found.notes[0]
    turned = job({"up.weight": FULL[4:], "bias": BIAS}, {"up.weight": FULL[:4], "bias": BIAS})
    assert np.array_equal(placed(*turned).tensors["up.weight"], np.concatenate([FULL[4:], FULL[:4]]))
    known = placed(*whole, Plan("tp=2").shard("up.weight", tp=0))
    assert not known.notes and all(s.sure for s in known.shards["up.weight"])
    assert "the plan says" in placed(*whole, Plan("tp=2").shard("up.weight", tp=1)).trouble[0]


def test_replicas_of_parts_and_uneven_parts_have_their_places() -> None:
    two = [{"up.weight": FULL[:5], "bias": BIAS}, {"up.weight": FULL[5:], "bias": BIAS}]
    found = placed(*job(*two, *two))
    assert np.array_equal(found.tensors["up.weight"], FULL)
    assert [len(s.places[0]) for s in found.shards["up.weight"]] == [5, 3, 5, 3]


def test_what_is_not_there_or_of_another_type_is_said() -> None:
    assert placed(*job({"up.weight": FULL})).trouble == ["no rank holds parameter bias"]
    assert "not known" in placed(*job({"up.weight": FULL[:3], "bias": BIAS})).trouble[0]
    capsules, tensors = job({"up.weight": FULL, "bias": BIAS.astype(np.float64)})
    wrong = capsules[0].state[1]
    state = (capsules[0].state[0], Variable(wrong.role, wrong.name, "float64", wrong.shape, "cpu", wrong.before, key=wrong.key))
    assert "float64 in the job" in placed({0: Capsule(key="k", step=3, state=state)}, tensors).trouble[0]


def test_a_replica_without_values_has_those_of_another() -> None:
    capsules, _ = job({"up.weight": FULL, "bias": BIAS}, {"up.weight": FULL, "bias": BIAS})
    bare = tuple(Variable("parameter", v.name, before=v.before, after=Print(7, 0, 1.0)) for v in capsules[0].state)
    mixed = {0: msgspec.structs.replace(capsules[0], state=bare), 1: msgspec.structs.replace(capsules[1], by_value=True)}
    found = borrow(mixed)
    assert not isinstance(found, int)
    held, lent = found
    assert [lent[0, v.key] for v in held[0].state] == [(1, "up.weight"), (1, "bias")]
    assert held[0].state[0].shape == (8, 4) and held[0].state[0].after == Print(7, 0, 1.0)
    other = (msgspec.structs.replace(bare[0], before=Print(1, 0)), bare[1])
    assert borrow({**mixed, 0: msgspec.structs.replace(capsules[0], state=other)}) == 0


def test_names_that_are_all_others_are_matched_by_order() -> None:
    found = placed(*job({"net.0.weight": FULL, "net.0.bias": BIAS}))
    assert not found.trouble and "by their order" in found.notes[0]


def test_optimizer_state_follows_its_parameter() -> None:
    capsules, tensors = job({"up.weight": FULL[:4], "bias": BIAS}, {"up.weight": FULL[4:], "bias": BIAS})
    for rank, values in ((0, FULL[:4] * 2), (1, FULL[4:] * 2)):
        moment = Variable("optimizer", "up.weight['exp_avg']", "float32", (4, 4), "cpu", key="m", optimizer="#0")
        count = Variable("optimizer", "up.weight['step']", value=7, optimizer="#0")
        group = Group("#0", "AdamW", 0, {"lr": 0.1 if rank else 0.2, "eps": 1e-8})
        capsules[rank] = Capsule(key="k", step=3, rank=rank, world=2, state=(*capsules[rank].state, moment, count), groups=(group,))
        tensors[rank, "m"] = values
    state = placed(capsules, tensors).optimizer["up.weight"]
    assert state["['step']"] == 7 and np.array_equal(state["['exp_avg']"][1], FULL * 2)
    assert hyperparameters(capsules) == ("AdamW", {"eps": 1e-8})


def seen(place: str, fp: int, shape: tuple[int, ...] = (4, 9), dtype: str = "int64", key: str = "x") -> Seen:
    return Seen(place, dtype, shape, "cpu", Print(fp, 0, 1.0), key and f"{key}{fp}")


def calls(fp: int) -> tuple[Call, ...]:
    """One microbatch: the model, and a loss of what it gives."""
    made = seen("0", 99, (36, 8), "float32", key="")
    return Call("module", "Net", (seen("0", fp),)), Call("loss", "cross_entropy", (made, seen("1", 100 + fp, (36,)))), Call("backward", "")


def test_each_data_parallel_replica_is_fed_once() -> None:
    first, second = (*calls(1), *calls(2)), (*calls(3), *calls(4))
    capsules = {r: Capsule(key="k", step=3, rank=r, world=4, calls=c) for r, c in enumerate((first, first, second, second))}
    assert [is_model_call(c) for c in first] == [True, False, False] * 2
    assert data_groups(capsules, [0, 1, 2, 3]) == [0, 2]
    streams, ranks, why = model_streams(capsules, [("int64", 2)])
    assert (ranks, why) == ([0, 2], "") and [k for _, k in streams[0].items] == ["x1", "x2", "x3", "x4"]
    [loss] = loss_streams(capsules, ranks)
    assert (loss.place, [k for _, k in loss.items]) == ("1", ["x101", "x102", "x103", "x104"])
    assert model_streams(capsules, [("float32", 2)])[2].startswith("no rank called a model")


def test_losses_of_a_pipeline_are_those_of_its_last_stage() -> None:
    begin = Capsule(key="k", step=3, rank=0, world=2, calls=(Call("module", "First", (seen("0", 1),)),))
    end = Capsule(key="k", step=3, rank=1, world=2, calls=(Call("module", "Last", (seen("0", 5, (4, 9, 8), "float32"),)), calls(1)[1]))
    streams, ranks, _ = model_streams({0: begin, 1: end}, [("int64", 2)])
    assert ranks == [0] and streams[0].items == ((0, "x1"),)
    assert loss_streams({0: begin, 1: end}, ranks)[0].items == ((1, "x101"),)


def test_a_norm_accuses_only_beyond_the_tolerance() -> None:
    part, allowed = np.full(16, 0.5), Tolerance(1e-3, 2.0)
    assert not _norms("gradient", "w", 0, Print(1, 0, 2.0005), part, allowed).wrong
    off = _norms("gradient", "w", 0, Print(1, 0, 4.0), part, allowed)
    assert off.wrong and off.note == "2 times the reference's"
    assert _norms("gradient", "w", 0, Print(0, int(StateFlag.NONE)), part, allowed).wrong
    assert _norms("gradient", "w", 0, Print(1, int(StateFlag.NONFINITE)), part, allowed).note == "it is not finite"
    unknown = _norms("gradient", "w", 0, Print(1, 0), part, allowed)
    assert not unknown.wrong and unknown.powerless


def test_rows_are_dealt_to_calls_of_another_size() -> None:
    torch = pytest.importorskip("torch")
    from proctor.oracle.collect.replay.replay_plan import Feed
    from proctor.oracle.collect.replay.replayed import _Feeding

    rows = {"a": torch.arange(8).reshape(4, 2), "b": torch.arange(8, 16).reshape(4, 2)}
    feeding = _Feeding(Feed("model", "0", ("a", "b"), "int64"), rows.__getitem__)
    given = [torch.zeros(n, 2, dtype=torch.int64) for n in (3, 3, 2)]
    assert [feeding.give(t) for t in given] == ["", "", ""]
    assert torch.equal(torch.cat(given), torch.arange(16).reshape(8, 2)) and feeding.fed.regrouped
    assert "more data" in feeding.give(torch.zeros(1, 2, dtype=torch.int64))
    alike = _Feeding(Feed("model", "0", ("a", "b"), "int64"), rows.__getitem__)
    view = torch.zeros(4, 4, dtype=torch.int64)[:, :2]
    assert alike.give(view) == "" and torch.equal(view, rows["a"]) and not alike.fed.regrouped
    assert "shape" in alike.give(torch.zeros(4, 3, dtype=torch.int64))
    assert "torch.int32" in alike.give(torch.zeros(4, 2, dtype=torch.int32))
    assert math.isclose(alike.fed.used, 1)
