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

from proctor.instrument.capsules import rng as _rng
from proctor.instrument.capsules.held import Holder, _bytes, _state, clone, leaves, observe
from proctor.instrument.capsules.state import StateValues, collect, restore, restore_gradients
from proctor.instrument.observe.seen import LastSeen
from proctor.instrument.observe.state import Look, StateTracker
from proctor.instrument.probes._copies import find
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


def test_what_is_kept_of_a_step_is_no_average_of_the_program_s() -> None:
    """The state of a step without buffers and moments is a list of a tensor for each parameter, as a program's average may be."""
    model = torch.nn.Bilinear(3, 5, 7)
    kept = clone([*model.parameters()])
    assert find(model, set(), gc.get_objects()) == []
    mine = [p.detach().clone() for p in model.parameters()]
    assert [copy.label for copy in find(model, set(), gc.get_objects())] == ["list"]
    assert len(mine) == len(clone([*model.parameters()], kept))


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
    tracker.observe(0, 0, 0, lambda: 0, data=Look.FORCE, grad=Look.FORCE, buffers=Look.FORCE, optimizer=Look.FORCE)
    seen = tracker.seen_last().by_role()
    assert {role: len(keys) for role, (keys, _) in seen.items()} == {"parameter": 6, "gradient": 6, "buffer": 3, "optimizer": 6}
    assert all(last is not None for _, lasts in seen.values() for last in lasts)
    assert len(tracker.parameters()) == 6 and len(tracker.buffers()) == 3


def same_states(reader: _rng.Reader) -> bool:
    said, read = _rng.read(), reader.read()
    assert [s.name for s in said] == [s.name for s in read]
    return all(
        a.plain == b.plain and (a.words == b.words if isinstance(a.words, bytes) else torch.equal(a.words, b.words))
        for a, b in zip(said, read)
    )


def test_states_are_read_where_they_lie_as_the_generators_say_them() -> None:
    reader = _rng.Reader()
    draws = [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(1), lambda: np.random.seed(3)]
    chosen = random.Random(0)
    for _ in range(200):
        assert same_states(reader)
        chosen.choice(draws)()
    assert reader._python is not None and reader._numpy is not None  # of this CPython and numpy the places are known


def test_a_state_from_which_nothing_was_drawn_is_the_same_object() -> None:
    random.seed(1), np.random.seed(1)
    reader = _rng.Reader()
    first, second = reader.read(), reader.read()
    assert first[1] is second[1] and first[2] is second[2]
    before = np.random.get_state()
    np.random.randn()
    spare = reader.read()[2]
    np.random.randn()  # takes the second of the pair: the words stay
    assert reader.read()[2] is not spare and reader.read()[2].words == spare.words
    np.random.set_state(before)
    assert same_states(reader)


def test_an_exchanged_generator_of_bits_is_noticed() -> None:
    reader = _rng.Reader()
    assert same_states(reader)
    there = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert same_states(reader) and len(reader.read()) == 2  # not the legacy one: nothing of it is kept
        np.random.set_bit_generator(np.random.MT19937(3))
        assert same_states(reader) and len(reader.read()) == 3
    finally:
        np.random.set_bit_generator(there)


def test_where_the_places_are_not_known_the_generators_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rng, "_gauss_offset", lambda kind: None)
    monkeypatch.setattr(_rng.sys.implementation, "name", "another")  # type: ignore[attr-defined]
    reader = _rng.Reader()
    assert reader._python is None and same_states(reader) and reader._numpy is None


def test_small_tensors_are_kept_as_bytes_of_every_type() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        t = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(kind)
        held = Holder().hold(t, 1 << 20)
        assert held.nbytes == t.nbytes and held.copy is not None
        assert held.copy.dtype == kind and held.copy.shape == (2, 3) and held.copy.tolist() == t.tolist()
    for odd in (torch.ones(3, 4)[:, ::2], torch.ones(4, dtype=torch.complex64).conj(), torch.ones(0), torch.tensor(2.5)):
        copy = Holder().hold(odd, 1 << 20).copy
        assert copy is not None and torch.equal(copy, odd)


def test_what_comes_out_twice_is_copied_once_unless_it_changed() -> None:
    holder, loss = Holder(), torch.ones(2)
    first = holder.observe(loss)
    assert holder.observe(loss) is first
    loss += 1
    assert holder.observe(loss) is not first


def test_tensors_that_cannot_say_whether_they_changed_are_copied_again() -> None:
    with torch.inference_mode():
        t = torch.zeros(2)
        holder = Holder()
        first = holder.hold(t, 1 << 20)
        t += 1
        again = holder.hold(t, 1 << 20)
    assert first.copy is not None and again.copy is not None and first.copy.sum() == 0 and again.copy.sum() == 2


def test_rows_of_values_that_are_gone_are_used_again() -> None:
    last = LastSeen()
    one, two = last.place(), last.place()
    last.fps[one], last.norms[one], last.flags[one] = 2**64 - 1, 1.5, 4
    before = last.now({"parameter": (["a", "b"], [one, two])})
    last.drop(one)
    assert last.place() == one
    assert before.by_role() == {"parameter": (["a", "b"], [(2**64 - 1, 4, 1.5), None])}
    assert before.without("parameter").by_role() == {"parameter": ([], [])}
    assert last.now({"buffer": (["c"], [one])}).by_role() == {"buffer": (["c"], [None])}


def test_what_was_seen_follows_parameters_that_come_and_go() -> None:
    _model, optimizer, tracker = trained("sgd")
    tracker.observe(0, 0, 0, lambda: 0, data=Look.FORCE)
    layout, before = tracker.layout, tracker.seen_last().by_role()
    assert tracker.seen_last() is tracker.seen_last()
    new = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [new]})  # type: ignore[attr-defined]
    tracker.refresh_optimizer(optimizer)
    assert tracker.layout != layout
    keys, prints = tracker.seen_last().by_role()["parameter"]
    assert keys[:-1] == before["parameter"][0] and keys[-1] == id(new) and prints[-1] is None
    tracker.observe(0, 0, 0, lambda: 0, data=Look.HINT)
    assert all(tracker.seen_last().by_role()["parameter"][1])


def test_what_is_no_usual_tensor_is_not_read_by_its_address() -> None:
    def content(t: torch.Tensor) -> object:
        return _bytes(t, _state(t)[1], 1 << 20)

    def look(x: torch.Tensor) -> torch.Tensor:
        wrapped.append(content(x))
        return x.sum()

    wrapped: list[object] = []
    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert wrapped == [None, None]
    freed = torch.ones(4)
    part = freed[1:]
    freed.untyped_storage().resize_(0)
    conj = torch.ones(2, dtype=torch.complex64).conj()
    odd = [freed, part, torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(3, 2).T, torch.ones(0), conj, conj.imag]
    assert [content(t) for t in odd] == [None] * len(odd)
    assert content(torch.tensor([1, 2], dtype=torch.uint8)) == b"\x01\x02"
