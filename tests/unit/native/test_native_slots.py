"""A look at tracked values: the same natively and in Python, through whatever happens to a tensor."""

from __future__ import annotations

import random
import weakref
from array import array
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.instrument.observe.content import reader
from proctor.instrument.observe.fingerprint import Summary, fingerprint, fingerprint_all
from proctor.native import Slot, holds, look
from proctor.native.twins import slots as twins
from proctor.native.twins.tensors import Tensors as Twin


class Side:
    """Slots of the same tensors in one implementation, and what its looks said.

    Args:
        native: of the extension, where it is in use; else the twin.
        owners: what gives each tensor.
    """

    def __init__(self, native: bool, owners: list[Any]) -> None:
        self.native = native
        make, self._look = (Slot, look) if native else (twins.Slot, twins.look)
        self.slots = [make(owner, 2 * i + grad, 0, grad, 2 * i + grad) for i, owner in enumerate(owners) for grad in (False, True)]
        self.last = array("Q", [9] * len(self.slots)), array("d", [9] * len(self.slots)), array("B", [9] * len(self.slots))
        self.rows: list[Any] = []
        self.asked = 0

    def context(self) -> int:
        self.asked += 1
        return 40 + self.asked

    def look(self, force: bool, silent: bool = False, settle: bool = True) -> Any:
        """Whether anything was looked at, the rows, all that is kept, and how often somebody asked for a context."""
        rows = None if silent else self.rows
        tensors: Any = reader() if self.native else None
        any_seen = self._look(tensors, [(self.slots[:2], force), (self.slots[2:], force)], self.last, settle, rows, (1, 2, 3), self.context, fingerprint_all)
        taken = self.rows[:]
        del self.rows[:]
        return any_seen, repr(taken), repr(self.last), self.asked, [(s.version, s.ptr) for s in self.slots]


def both(owners: list[Any]) -> tuple[Side, Side]:
    return Side(True, owners), Side(False, owners)


def agree(sides: tuple[Side, Side], force: bool, **how: bool) -> list[Any]:
    mine, other = sides[0].look(force, **how), sides[1].look(force, **how)
    assert mine == other
    rows = eval(mine[1], {"nan": float("nan"), "inf": float("inf")})
    assert isinstance(rows, list)
    return rows


def test_the_same_through_a_life_of_parameters() -> None:
    """New, with gradients, written, cleared, gone; a row where there is something new, and none where there is not."""
    with torch.inference_mode():
        inferred = torch.ones(2)
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2).t())]
    product = parameters[0] * 2
    sides = both([weakref.ref(t) for t in (*parameters, product, inferred)])
    assert len(agree(sides, False)) == 4 + 3, "all data, and of the leaves that they have no gradient"
    assert agree(sides, False) == [], "an inference tensor has no version: it is hashed, and is what it was"
    parameters[0].grad = torch.ones(3)
    assert [row[4:] for row in agree(sides, False)] == [(1, 0, *fingerprint(torch.ones(3)))]
    with torch.no_grad():
        parameters[1].add_(1)
    assert [row[4] for row in agree(sides, False)] == [2]
    parameters[0].data[1] = 7  # past the version counter
    assert agree(sides, False) == [] and [row[4] for row in agree(sides, True)] == [0]
    parameters[0].grad = None
    assert [row[4:] for row in agree(sides, False)] == [(1, 0, 0, 0.0, 1)]
    parameters[0].data = torch.zeros(3)
    assert [row[4] for row in agree(sides, False)] == [0]
    del product
    parameters.pop()
    assert agree(sides, True) == []


def test_a_look_without_rows_settles_or_leaves_no_trace() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    sides = both([weakref.ref(parameter)])
    assert agree(sides, True, silent=True) == [] and agree(sides, True) == [], "known now, told to nobody"
    with torch.no_grad():
        parameter.add_(1)
    assert agree(sides, True, silent=True, settle=False) == []
    assert sides[0].last[0][0] == fingerprint(parameter).fp, "seen"
    assert [row[4] for row in agree(sides, True)] == [0], "and told by the next look"


def test_other_names_and_another_meta_are_told() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    sides = both([weakref.ref(parameter)])
    for side in sides:
        side.slots[0].twins.append(77)
    assert [row[4] for row in agree(sides, True)] == [0, 77, 1]
    for side in sides:
        side.slots[0].meta = 5
    assert [row[4:6] for row in agree(sides, True)] == [(0, 5), (77, 5)]


def test_an_owner_may_be_any_function() -> None:
    module = torch.nn.BatchNorm1d(2)
    owner = partial(lambda m: m._buffers["running_mean"], module)
    sides = both([owner])
    assert [row[4] for row in agree(sides, False)] == [0, 1]
    module.running_mean = torch.ones(2)
    assert [row[4] for row in agree(sides, False)] == [0], "another tensor is there now"


class _Own(torch.Tensor):
    pass


def _odd() -> list[torch.Tensor]:
    freed = torch.ones(8)
    view = freed[2:6]
    freed.untyped_storage().resize_(0)
    return [
        torch.ones(0), torch.ones(2, 3).t(), torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3).as_subclass(_Own), view, torch.tensor(2.0),
        torch.ones(3, dtype=torch.bfloat16), torch.tensor([float("nan"), 1.0]), torch.arange(70_000),
    ]  # fmt: skip


def test_what_is_not_plain_is_read_by_python_in_its_place() -> None:
    kept = _odd()
    sides = both([weakref.ref(t) for t in kept])
    rows = agree(sides, True)
    assert [repr(Summary(*row[6:])) for row in rows if row[4] % 2 == 0] == [repr(fingerprint(t)) for t in kept]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=25), st.integers(0, 99))
def test_whatever_happens_both_say_the_same(acts: list[tuple[int, int, bool]], seed: int) -> None:
    draw = random.Random(seed)
    tensors: list[Any] = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    sides = both([weakref.ref(t) for t in tensors])
    for act, at, force in acts:
        tensor = tensors[at]
        if tensor is None:
            continue
        with torch.no_grad():
            if act == 0:
                tensor.add_(draw.choice([0.0, 1.0]))
            elif act == 1:
                tensor.grad = torch.full((3,), draw.choice([0.0, 2.0]))
            elif act == 2:
                tensor.grad = None
            elif act == 3:
                tensor.data = torch.zeros(3)
            elif act == 4:
                tensor.data.mul_(2)
            elif act == 5:
                tensor = tensors[at] = None
        agree(sides, force, silent=draw.random() < 0.2, settle=draw.random() < 0.8)


@pytest.mark.parametrize("native", [True, False])
def test_an_error_of_an_attribute_reaches_the_caller(native: bool) -> None:
    class Broken(torch.Tensor):
        def data_ptr(self) -> int:
            raise ValueError("no address")

    thing = torch.ones(2).as_subclass(Broken)
    with pytest.raises(ValueError, match="no address"):
        Side(native, [weakref.ref(thing)]).look(True)


@pytest.mark.parametrize("native", [True, False])
def test_an_error_of_the_context_reaches_the_caller(native: bool) -> None:
    thing = torch.ones(2)
    side = Side(native, [weakref.ref(thing)])
    side.context = lambda: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        side.look(True)


def _expected(make: Any, p: Any, state: dict[Any, Any]) -> Any:
    return ((id(p), tuple((k, make(weakref.ref(v), 0, 0, False, 0) if isinstance(v, torch.Tensor) else type(v)) for k, v in state.items())),)


@pytest.mark.parametrize(("ask", "make"), [(holds, Slot), (twins.holds, twins.Slot)])
def test_state_of_an_optimizer_is_where_it_was_or_it_is_not(ask: Any, make: Any) -> None:
    p, moment = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    state = {p: {"exp_avg": moment, "step": 3, "buffer": None}}
    wanted = _expected(make, p, state[p])
    assert ask(state, wanted) and ask(state, ((id(p), None),))
    state[p]["step"] = 4
    assert ask(state, wanted), "another number of the same type"
    for change in (
        {"step": torch.ones(())}, {"buffer": torch.zeros(3)}, {"exp_avg": moment.clone()}, {"more": 1},
    ):  # fmt: skip
        assert not ask({p: {**state[p], **change}}, wanted)
    assert not ask({p: {"exp_avg": moment, "buffer": None, "step": 4}}, wanted), "in another order"
    assert not ask({}, wanted) and not ask({p: state[p], moment: {}}, wanted) and not ask({moment: state[p]}, wanted)
    assert not ask({p: [1, 2, 3]}, wanted) and not ask([p], wanted)
    scalar = torch.ones(())
    assert ask({p: {"mu": scalar}}, ((id(p), (("mu", weakref.ref(scalar)),)),))
    assert not ask({p: {"mu": scalar.clone()}}, ((id(p), (("mu", weakref.ref(scalar)),)),))


def test_the_twin_needs_no_reader() -> None:
    thing = torch.ones(2)
    rows: list[Any] = []
    slot = twins.Slot(weakref.ref(thing), 3, 4, False, 0)
    last = array("Q", [0]), array("d", [0]), array("B", [0])
    assert twins.look(Twin(torch.Tensor, torch.nn.Parameter, None, {}, Summary), [([slot], True)], last, True, rows, (1, 2, 3), lambda: 5, fingerprint_all)
    assert rows == [(1, 2, 3, 5, 3, 4, *fingerprint(thing))]
