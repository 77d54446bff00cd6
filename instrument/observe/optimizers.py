"""The state of optimizers that is tensors: moments, buffers, accumulators.

An optimizer makes its state when it likes and may put other tensors in its place (`load_state_dict`). So each look asks whether the same
tensors are in the same places, natively, and only what is new is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from proctor.instrument.observe.plainly import is_scalar, is_tensor
from proctor.instrument.observe.refs import TensorRef
from proctor.native import Slot, holds

_Expected = tuple[tuple[int, tuple[tuple[Any, Any], ...] | None], ...]  # what `holds` is asked


class OptimizerStates:
    """Slots of the state of all optimizers.

    Args:
        tracked: whether a parameter of this id is tracked.
        make: the slot of a tensor that is new: of its parameter, its key, itself, and what was there before.

    Attributes:
        slots: by the id of the parameter and the key.
    """

    def __init__(self, tracked: Callable[[int], bool], make: Callable[[Any, Any, Any, Slot | None], Slot]) -> None:
        self._tracked, self._make = tracked, make
        self.slots: dict[tuple[int, Any], Slot] = {}
        self._found: dict[int, tuple[int, _Expected, list[Slot]]] = {}  # by the id of an optimizer: layout, where its state was, and its slots

    def present(self, optimizers: Iterable[Any], layout: int) -> list[Slot]:
        """Slots of all that is there now.

        Args:
            layout: another number when other parameters are tracked.
        """
        found: list[Slot] = []
        for optimizer in optimizers:
            known = self._found.get(id(optimizer))
            if known is None or known[0] != layout or not holds(optimizer.state, known[1]):
                known = self._found[id(optimizer)] = layout, *self._search(optimizer.state)
            found += known[2]
        return found

    def _search(self, states: Any) -> tuple[_Expected, list[Slot]]:
        expected: list[tuple[int, tuple[tuple[Any, Any], ...] | None]] = []
        slots: list[Slot] = []
        for p, state in states.items():
            if not self._tracked(id(p)):
                expected.append((id(p), None))  # until it is tracked, which changes the layout
                continue
            there: list[tuple[Any, Any]] = []
            for key, value in state.items() if isinstance(state, dict) else ():
                if key == "step":
                    there.append((key, None))
                elif not is_tensor(value):
                    there.append((key, type(value)))
                elif is_scalar(value):
                    there.append((key, TensorRef(value)))
                else:
                    slots.append(self._slot(p, key, value))
                    there.append((key, slots[-1]))
            expected.append((id(p), tuple(there)))
        return tuple(expected), slots

    def _slot(self, p: Any, key: Any, value: Any) -> Slot:
        slot = self.slots.get((id(p), key))
        if slot is None or slot.owner() is not value:
            slot = self.slots[(id(p), key)] = self._make(p, key, value, slot)
        return slot
