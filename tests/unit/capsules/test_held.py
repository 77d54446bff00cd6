"""What is kept of tensors, containers and random states, and that nothing of the user's is touched."""

from __future__ import annotations

import gc
import random
import weakref
from collections import UserDict, namedtuple
from types import SimpleNamespace

import numpy as np
import numpy.random  # numpy 2.4 imports it late, and what is not there has no state
import pytest

pytest.importorskip("torch")
import torch

from proctor.instrument import _rng
from proctor.instrument._held import Holder, clone, leaves, observe
from proctor.instrument._step_state import StateValues, collect, restore, restore_gradients
from proctor.instrument.state import Look, StateTracker
from proctor.invariants.capsule import Variable

Pair = namedtuple("Pair", "x y")


def places(root: object, names: bool = False) -> dict[str, object]:
    return dict(leaves(root, names))


def test_containers_of_all_kinds_are_entered() -> None:
    t = torch.ones(2)
    found = places([t, {"a": (t, 3)}, UserDict({"ids": t}), Pair(t, "text"), SimpleNamespace(mask=t, n=1)])
    assert list(found) == ["[0]", "[1]['a'][0]", "[1]['a'][1]", "[2]['ids']", "[3][0]", "[3][1]", "[4].mask", "[4].n"]


def test_arguments_have_their_own_places() -> None:
    assert list(places((1, [2], {"mask": 3}), names=True)) == ["0", "1[0]", "mask"]


def test_a_container_that_holds_itself_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert len(leaves(loop)) == 1


def test_a_kept_tensor_does_not_follow_its_original() -> None:
    t = torch.zeros(3)
    held = Holder().hold(t, 1 << 20)
    t += 1
    assert held.copy is not None and held.copy.sum() == 0


def test_the_same_tensor_is_copied_once_and_again_when_it_changed() -> None:
    holder, t = Holder(), torch.zeros(3)
    first = holder.hold(t, 1 << 20)
    assert holder.hold(t, 1 << 20) is first
    t += 1
    assert holder.hold(t, 1 << 20) is not first


def test_over_the_budget_only_the_fingerprint_is_kept() -> None:
    held = Holder().hold(torch.zeros(100), 399)
    assert held.copy is None and held.summary is not None and "over the budget" in held.note


def test_no_graph_and_no_tensor_is_kept_alive() -> None:
    w = torch.ones(4, requires_grad=True)
    out = w * 2
    alive, holder = weakref.ref(out), Holder()
    held, seen = holder.hold(out, 1 << 20), observe(out)
    assert held.copy is None and held.summary is not None  # a graph made it
    assert seen.copy is not None and not seen.copy.requires_grad
    del out
    gc.collect()
    assert alive() is None


def test_memory_is_used_again_where_it_fits() -> None:
    first = clone([torch.ones(3), torch.ones(2, 2)])
    again = clone([torch.zeros(3), torch.zeros(2, 2)], first)
    assert again[0] is first[0] and again[0].sum() == 0
    assert clone([torch.ones(4)], first)[0] is not first[0]


def test_reading_random_states_draws_nothing_and_they_can_be_set_again() -> None:
    states = _rng.read()
    drawn = torch.rand(2).tolist(), random.random(), float(np.random.rand())
    for state in states:
        assert _rng.write(state)
    assert (torch.rand(2).tolist(), random.random(), float(np.random.rand())) == drawn


def test_the_second_of_a_pair_of_normal_numbers_comes_back() -> None:
    random.gauss(0, 1), np.random.randn()
    states = _rng.read()
    drawn = random.gauss(0, 1), float(np.random.randn())
    random.random(), np.random.rand()
    for state in states:
        _rng.write(state)
    assert (random.gauss(0, 1), float(np.random.randn())) == drawn


def trained(kind: str) -> tuple[object, object, StateTracker]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, torch.tensor(0.1)),
        "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    }
    optimizer = made[kind](model.parameters())
    tracker = StateTracker(lambda kind, text: hash((kind, text)) & 0xFFFF, lambda attr: True)
    tracker.add_optimizer(optimizer, "#0")
    step(model, optimizer)
    return model, optimizer, tracker


def step(model: object, optimizer: object) -> None:
    def closure() -> object:
        optimizer.zero_grad()  # type: ignore[attr-defined]
        loss = model(torch.linspace(0, 1, 12).view(4, 3)).square().sum()  # type: ignore[operator]
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[attr-defined]


def numbers(model: object, optimizer: object) -> list[object]:
    tensors = [*model.state_dict().values()]  # type: ignore[attr-defined]
    tensors += [v for s in optimizer.state.values() for v in s.values() if hasattr(v, "data_ptr")]  # type: ignore[attr-defined]
    return [t.tolist() for t in tensors]


@pytest.mark.parametrize("kind", ["sgd", "adam", "lbfgs"])
def test_state_that_is_put_back_gives_the_same_next_step(kind: str) -> None:
    model, optimizer, tracker = trained(kind)
    values, groups, missing = collect(tracker, [])
    if kind == "lbfgs":  # keeps a function count under a key of no tensor: also plain
        assert all("lbfgs" not in m for m in missing)
    kept = StateValues(values, groups, missing)
    store = {f"{v.role} {v.name}": held.copy for v, held in kept.held if held is not None}
    variables = [
        Variable(v.role, v.name, device="cpu", key="" if h is None else f"{v.role} {v.name}", value=v.plain, optimizer=v.optimizer, trains=v.trains)
        for v, h in kept.held
    ]
    step(model, optimizer)
    once = numbers(model, optimizer)
    step(model, optimizer)
    assert numbers(model, optimizer) != once
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 1  # type: ignore[attr-defined]
    assert restore(tracker, [], variables, groups, lambda key: store[key].clone()) == []
    restore_gradients(tracker, variables, lambda key: store[key].clone())
    step(model, optimizer)
    assert numbers(model, optimizer) == once


def test_what_is_not_in_the_program_is_named() -> None:
    _, _, tracker = trained("sgd")
    trouble = restore(tracker, [], [Variable("parameter", "other.weight", key="x")], [], lambda key: torch.ones(1))
    assert "parameter other.weight is not in this program" in trouble
    assert any("0.weight is not in the capsule" in t for t in trouble)


def test_the_tracker_says_what_it_saw_last() -> None:
    _model, _, tracker = trained("sgd")
    tracker.observe(0, 0, 0, 0, data=Look.FORCE, grad=Look.FORCE, buffers=Look.FORCE, optimizer=Look.FORCE)
    seen = tracker.seen_last()
    assert {role: len(keys) for role, (keys, _) in seen.items()} == {"parameter": 6, "gradient": 6, "buffer": 3, "optimizer": 6}
    assert all(last is not None for _, lasts in seen.values() for last in lasts)
    assert len(tracker.parameters()) == 6 and len(tracker.buffers()) == 3
