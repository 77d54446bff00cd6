"""What the model is given: a fingerprint of the tensors of each outermost forward that trains.

Lists, tuples and dicts are entered; the first few tensors count. All of them together are one value: a batch is
another batch if any of its tensors differs. A program that gives one large batch in each step is looked at in one of eight, when it has done so for a while. Of a model that is called hundreds of times between two backwards (a solver) the first
sixteen calls are told.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from proctor.instrument.observe.content import no_torch_function
from proctor.instrument.observe.fingerprint import Summary, fingerprint_all, look_at
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

_FORWARDS: Final = 16  # between two backwards
_STILL: Final = 64  # calls in a row that were given large tensors alone, and the ones before; then
_EVERY: Final = 8  # one of so many is looked at
_TENSORS: Final = 4  # of one call
_DEPTH: Final = 3
_ENTRIES: Final = 16  # of one container
_CPU_BYTES: Final = 64 << 20
_LARGE: Final = 1 << 20
_BACKWARDS: Final = ("torch.autograd.backward", "torch.autograd.grad")  # the first is what `Tensor.backward` calls, too
_LOOK: Final = 1 << 8  # bytes at each of sixteen places
_DEVICE_BYTES: Final = 8 << 20  # hashing there waits for the device


@register
class Batches(Probe):
    """Rows of `Value.BATCH`, one a tensor."""

    name = "batches"
    kinds = frozenset({Value.BATCH})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._large: dict[str, tuple[weakref.ref[Any], tuple[Any, ...], Summary]] = {}
        self._left = _FORWARDS
        self._still = self._passed = 0
        self._given: tuple[tuple[int, ...], list[tuple[weakref.ref[Any], int]]] = ((), [])

    def step_begins(self, step: int) -> None:
        self._left = _FORWARDS

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _BACKWARDS:
            return self._propagates, None
        if function != MODEL_CALL:
            return NO_HOOKS
        tensor = torch.Tensor

        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            if self._left <= 0 or not getattr(args[0], "training", False) or not torch.is_grad_enabled():
                return
            self._left -= 1
            if self._still >= _STILL and self._passed < _EVERY - 1 and self._again(args, kwargs):
                self._passed += 1
                return
            self._passed, again = 0, True
            found: list[tuple[str, int, Any]] = []
            for i, value in enumerate(args[1:]):
                _collect(str(i), value, _DEPTH, tensor, found)
            for key, value in (kwargs or {}).items():
                _collect(key, value, _DEPTH, tensor, found)
            for place, item, value in found:
                summary, known = self._summary(place, value)
                again &= known
                self.sink.summary(Value.BATCH, place, value, summary, item=item)
            self._still = self._still + 1 if found and again else 0
            self._given = tuple(map(id, args)), [(TensorRef(value), value._version) for _, _, value in found] if self._still >= _STILL else []

        return before, None

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether a call is given what the last one that was looked at was, as far as objects and versions tell."""
        ids, tensors = self._given
        return not kwargs and tuple(map(id, args)) == ids and all((value := ref()) is not None and value._version == version for ref, version in tensors)

    def _propagates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._left = _FORWARDS

    def _summary(self, place: str, value: Any) -> tuple[Summary, bool]:
        """Of a large tensor that is the same object, version and memory as last time, and the same at sixteen places, as
        last time: a full batch is hashed once and not at every step; and whether that was so."""
        looks = look_at(value, _LOOK) if _size(value) >= _LARGE else None
        if looks is None or value.is_inference():  # such a tensor has no version
            return fingerprint_all([value])[0], False
        state = (value._version, value.data_ptr(), _size(value), looks)
        last = self._large.get(place)
        if last is not None and last[0]() is value and last[1] == state:
            return last[2], True
        summary = fingerprint_all([value])[0]
        self._large[place] = (TensorRef(value), state, summary)
        return summary, False


def _collect(place: str, value: Any, depth: int, tensor: type, found: list[tuple[str, int, Any]]) -> None:
    if len(found) >= _TENSORS:
        return
    if issubclass(type(value), tensor):
        with no_torch_function():
            most = _CPU_BYTES if value.device.type == "cpu" else _DEVICE_BYTES
        if 0 < _size(value) <= most:
            found.append((place, -1, value))
    elif depth and type(value) in (list, tuple):
        for i, item in enumerate(value[:_ENTRIES]):
            _collect(f"{place}[{i}]", item, depth - 1, tensor, found)
    elif depth and issubclass(type(value), dict):
        for key, item in list(dict.items(value))[:_ENTRIES]:
            _collect(f"{place}[{key!r}]", item, depth - 1, tensor, found)


def _size(value: Any) -> int:
    """Bytes; 0 of what has no dense content."""
    with no_torch_function():
        return int(value.numel() * value.element_size()) if value.layout is torch.strided else 0
