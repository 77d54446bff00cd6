"""`slots.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_NONE = 1  # of `StateFlag`


class Slot:
    """One tracked value: the data or grad of a parameter, a buffer, or a tensor of optimizer state.

    Args:
        owner: gives the tensor, or None once it is gone: tracking must not keep a model alive.
        var, meta: codes of its variable, and of what is known of it besides its value.
        grad: the gradient of what `owner` gives.
        at: its row in `LastSeen`.
    """

    __slots__ = ("at", "grad", "last", "meta", "owner", "ptr", "sharded", "twins", "var", "version")

    def __init__(self, owner: Callable[[], Any], var: int, meta: int, grad: bool, at: int) -> None:
        self.sharded = hasattr(owner(), "_local_tensor")  # DTensor: this rank's part is hashed
        self.owner = owner
        self.var = var
        self.meta = meta
        self.grad = grad
        self.twins: list[int] = []  # variables that are other names of the same tensor
        self.version = -1
        self.ptr = -1
        self.last: tuple[int, int, int] | None = None  # fingerprint, flags, meta of the last row
        self.at = at


def _collect(found: list[tuple[Slot, Any]], slot: Slot, force: bool) -> None:
    """Add the slot if its tensor is to be hashed: always if `force`, or where version or address moved."""
    t = slot.owner()
    if t is None:
        return
    if slot.grad:
        if not t.is_leaf:
            return  # what was made of others has none
        t = t.grad
        if t is None:
            if slot.ptr != 0:
                slot.ptr, slot.version = 0, -1
                found.append((slot, None))
            return
    try:
        version = t._version
    except RuntimeError:  # inference tensors have none
        version = -1
    if slot.sharded:
        t = getattr(t, "_local_tensor", t)
    ptr = t.data_ptr()
    if not force and version == slot.version and ptr == slot.ptr and version >= 0:
        return
    slot.version, slot.ptr = version, ptr
    found.append((slot, t))


def look(
    tensors: Any, groups: list[tuple[list[Slot], bool]], last: tuple[Any, Any, Any], settle: bool, rows: list[Any] | None, where: tuple[int, int, int],
    context: Callable[[], int], rest: Callable[[list[Any]], list[Any]],
) -> bool:
    """Look at the slots of each group, all if its second is true, else those that may have changed. False: at none.

    Args:
        tensors: reads plain ones in the native one; `rest` reads all here.
        groups: slots, and whether all are hashed.
        last: `LastSeen`'s columns, written for each that was looked at.
        settle: later looks tell what changes from now on; else this look is as if it had not been.
        rows: a row is added for each that changed; None: nobody is told.
        where: the first three fields of a row.
        context: gives the fourth; asked where there is a row.
        rest: fingerprint, norm and flags of each tensor.
    """
    del tensors
    found: list[tuple[Slot, Any]] = []
    for slots, force in groups:
        for slot in slots:
            _collect(found, slot, force)
    if not found:
        return False
    given = [value for _, value in found if value is not None]
    answers = iter(rest(given) if given else [])
    summaries = [(0, 0.0, _NONE) if value is None else next(answers) for _, value in found]
    fps, norms, marks = last
    for (slot, _), (fp, norm, flags) in zip(found, summaries, strict=True):
        fps[slot.at], norms[slot.at], marks[slot.at] = fp, norm, flags
    now: int | None = None
    for (slot, _), (fp, norm, flags) in zip(found if settle else [], summaries):
        state = (fp, flags, slot.meta)
        if state == slot.last:
            continue
        slot.last = state
        if rows is not None:
            now = context() if now is None else now
            rows += [(*where, now, var, slot.meta, fp, norm, flags) for var in (slot.var, *slot.twins)]
    return True


def holds(state: Any, expected: tuple[tuple[int, tuple[tuple[Any, Any], ...] | None], ...]) -> bool:
    """Whether the state of an optimizer is still where `expected` says.

    Args:
        state: of the optimizer, by parameter.
        expected: for each parameter its id and None (whatever it is), or for each key what is there: a slot or a weak reference (its tensor), a
            type (one of that type), None (whatever it is).
    """
    if not isinstance(state, dict) or len(state) != len(expected):
        return False
    for (parameter, own), (key, values) in zip(state.items(), expected, strict=True):
        if id(parameter) != key:
            return False
        if values is None:
            continue
        if not isinstance(own, dict) or len(own) != len(values):
            return False
        for (name, value), (known, wanted) in zip(own.items(), values, strict=True):
            if name is not known or not _is(value, wanted):
                return False
    return True


def _is(value: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, type):
        return type(value) is wanted
    weak = wanted if isinstance(wanted, weakref.ref) else wanted.owner
    return isinstance(weak, weakref.ref) and weak() is value
