"""Evaluations of a copy of a model that say the same again: read by `averages`, one object for each copy that is a module.

`rests`: the copy is evaluated as it was evaluated before, with the same first batch and the same weights, while the model trained between the two and was not itself
evaluated. An average that nobody updates, or a model that was copied too early. A teacher or a reference is called once between two forwards of the model that trains,
or beside forwards of the model without gradients: no evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from proctor.instrument.observe import content
from proctor.instrument.probes import _copies

_ELEMENTS: Final = 6  # of a tensor
_LEAST: Final = 2  # calls of an evaluation
_INPUTS: Final = 8  # tensors of a call
_LARGEST: Final = 1 << 24  # elements


class Resting:
    """Evaluations of one copy.

    Args:
        copy: the copy and the tensors in it that are looked at.
    """

    def __init__(self, copy: _copies.Copy) -> None:
        self._pairs = copy.pairs
        self._calls = 0  # of the copy in evaluation mode since the model last trained
        self._beside = False  # the model was called without gradients since then
        self._given: Sequence[int] = ()
        self._last: tuple[Sequence[int], list[float], list[float]] | None = None  # what the last evaluation was given; the copy and the model at that time

    def trains(self) -> bool | str | None:
        """The model is called to train, so that an evaluation is over: what rests, True if the copy moved, None where nothing can be said."""
        whole, self._calls, self._beside = self._calls >= _LEAST and not self._beside, 0, False
        if not whole or not self._given:
            return None
        copy = _copies.values(iter(c for c, _ in self._pairs), _ELEMENTS)
        model = _copies.values(iter(p for _, p in self._pairs), _ELEMENTS)
        before, self._last = self._last, None if copy is None or model is None else (self._given, copy, model)
        if before is None or self._last is None or before[0] != self._given or before[2] == model:
            return None
        if before[1] != copy:
            return True
        return "the copy is evaluated again on the same data and has not changed since, while the model trained and is not evaluated"

    def looks(self) -> None:
        """The model is called, and does not train."""
        self._beside = True

    def called(self, values: Sequence[Any]) -> None:
        """The copy is called in evaluation mode."""
        self._calls += 1
        if self._calls == 1:
            self._given = _prints(values)


def _prints(values: Sequence[Any]) -> Sequence[int]:
    """Of the tensors of a call; none where they are elsewhere than on the CPU, or too large."""
    from proctor.instrument.observe.fingerprint import fingerprint_all

    given = [tensor for value in values for tensor in _tensors(value)]
    if not given or len(given) > _INPUTS or not all(content.plain(tensor, _LARGEST) for tensor in given):
        return ()
    return tuple(summary.fp for summary in fingerprint_all([tensor.detach() for tensor in given]))


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for inner in list(value.values() if isinstance(value, dict) else value)[:_INPUTS]:
            if isinstance(inner, torch.Tensor):
                yield inner
