"""Whether a model is shown the words that it is to tell.

A row of `Value.KEPT`, `shown`, of a loss over words for the third time in a row: some words of what an embedding was given have a target, less than half of them, and each of these targets, sixteen at least and of four kinds, is the word that
stands at its place. A model that tells hidden words (BERT's) is to be given a mask there, or another word, at nine of ten of them. Targets lie at the places of the input (others are ignored), or places come beside the input, as the model is
given them. A model that tells all words of its input (an autoencoder), or what comes next, is none. Only the first steps are looked at, and only tensors on the CPU. Cost: 50 µs a loss.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import array_of
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes.judged import OVER_CLASSES, readable
from proctor.invariants.schema import MODEL_CALL, Value

_EMBEDDING: Final = "torch.nn.functional.embedding"
_ARGUMENTS: Final = ("input", "target", "weight", "size_average", "ignore_index")
_IGNORED: Final = -100
_SEQUENCES: Final = 8
_TENSORS: Final = 8
_LEAST: Final = 16  # targets
_KINDS: Final = 4  # of them
_TIMES: Final = 3
Words = np.ndarray[Any, Any]


@register
class Shown(EarlyProbe):
    """Targets in the input."""

    name = "shown"
    kinds = frozenset({Value.KEPT})
    looks = 16

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._ids: list[Words] = []
        self._places: list[Words] = []
        self._times = 0

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._begins, None
        return {_EMBEDDING: (self._embeds, None)}.get(function, (self._lost, None) if function in OVER_CLASSES else NO_HOOKS)

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        self._ids, self._places = [], []

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left > 0 and getattr(args[0], "training", False) and next(plainly.parameters(args[0]), None) is not None:  # a loss is no model
            given = [*args[1:], *(kwargs or {}).values()][:_TENSORS]
            self._ids, self._places = [], [array_of(value) for value in given if _words(value)]

    def _embeds(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        value: Any = args[0] if args else (kwargs or {}).get("input")
        if self.left > 0 and len(self._ids) < _SEQUENCES and _words(value):
            self._ids.append(array_of(value))

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0 or not self._ids:
            return
        told: dict[str, Any] = dict(zip(_ARGUMENTS, args)) | (kwargs or {})
        scores: Any = told.get("input")
        target: Any = told.get("target")
        if not getattr(scores, "requires_grad", False) or not readable(target) or target.is_floating_point() or type(ignored := told.get("ignore_index", _IGNORED)) is not int:
            return
        self.left -= 1
        flat = array_of(target).reshape(-1)
        found = next((seen for ids in self._ids if (seen := _here(ids, flat, ignored) or self._beside(ids, flat)) is not None), None)
        if found is None:  # a loss of something else says nothing
            return
        right, many, places = found
        self._times = self._times + 1 if right == many else 0
        if self._times == _TIMES:
            text = f"the model is given the words that it is to tell: at all {many} places of {places} that have a target the input holds it"
            self.sink.number("target", float(many), kind=Value.KEPT, facts={"what": "shown", "seen": text})

    def _beside(self, ids: Words, flat: Words) -> tuple[int, int, int] | None:
        """As `_here`, of targets whose places the model is given."""
        for places in self._places:
            if places.size != flat.size or len(places) != len(ids) or places.shape[1] * 2 >= ids.shape[1] or places.min() < 0 or places.max() >= ids.shape[1]:
                continue
            if len(np.unique(places)) < _KINDS:
                continue
            targets = flat.reshape(places.shape)
            counted = ~((places == 0) & (targets == targets.min()))  # rows of fewer targets are filled up
            return _counts(np.take_along_axis(ids, places, 1)[counted], targets[counted], ids.size)
        return None


def _here(ids: Words, flat: Words, ignored: int) -> tuple[int, int, int] | None:
    """How many targets are the word at their place, how many there are, and of how many places; None where these are no targets of some places."""
    if flat.size != ids.size:
        return None
    counted, words = flat != ignored, ids.reshape(-1)
    others = words[~counted]
    if not len(others) or not bool(counted.any()):
        return None
    numbers, times = np.unique(others, return_counts=True)
    told = _counts(words[counted], flat[counted], ids.size)
    # Padding is no word: an autoencoder tells all words that there are.
    return told if int(counted.sum()) < len(others) - int(times.max()) and len(numbers) > _KINDS else None


def _counts(given: Words, targets: Words, places: int) -> tuple[int, int, int] | None:
    enough = len(targets) >= _LEAST and len(np.unique(targets)) >= _KINDS
    return (int((given == targets).sum()), len(targets), places) if enough else None


def _words(value: Any) -> bool:
    return readable(value) and value.dim() == 2 and str(value.dtype) in ("torch.int64", "torch.int32")
