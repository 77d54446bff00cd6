"""Whether results of padded sequences lie in the order of their targets, and whether places of padding count, where a model leaves them out (packed sequences).

Rows of `Value.KEPT`, of a loss over classes whose results are of as many sequences as an embedding was given. A model that leaves padding out gives one and the same result for all of these places, to the last bit, so that the lengths of its
sequences can be told from its results; those of the targets are told from the number that they end in. `sorted`: these are the same lengths in another order, for the second batch: sequences were sorted by their lengths, as packing asks for, and not put
back, so that each is held against the target of another. `padding`: they are the same lengths in the same order, and places of padding count (the number is not ignored, and no weights are given), for the second batch.
Lengths of at least three kinds are needed. A model that computes something of places of padding gives others there, and says nothing. Only the first steps are looked at, and only tensors on the CPU. Cost: 50 µs a loss.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from proctor.instrument.observe.content import array_of, unseen
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes.judged import OVER_CLASSES, readable
from proctor.invariants.schema import Value

_EMBEDDING: Final = "torch.nn.functional.embedding"
_ARGUMENTS: Final = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_KINDS: Final = 3  # of lengths
_LEAST: Final = 4  # places, and sequences
_TWICE: Final = 2
_SHAPES: Final = 8
_LARGEST: Final = 1 << 22  # elements of results
_IGNORED: Final = -100


@register
class Packed(EarlyProbe):
    """Lengths of sequences, in results and in targets."""

    name = "packed"
    kinds = frozenset({Value.KEPT})
    looks = 16

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._shapes: set[tuple[int, int]] = set()  # of what was embedded since the last loss
        self._times = {"sorted": 0, "padding": 0}

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _EMBEDDING:
            return self._embeds, None
        return (self._lost, None) if function in OVER_CLASSES else NO_HOOKS

    def _embeds(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        value: Any = args[0] if args else (kwargs or {}).get("input")
        if self.left > 0 and getattr(value, "ndim", 0) == 2 and min(value.shape) >= _LEAST and len(self._shapes) < _SHAPES:
            self._shapes.add((int(value.shape[0]), int(value.shape[1])))

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0 or not self._shapes:
            return
        shapes, self._shapes = self._shapes, set()
        given: dict[str, Any] = dict(zip(_ARGUMENTS, args)) | (kwargs or {})
        scores: Any = given.get("input")
        target: Any = given.get("target")
        if not getattr(scores, "requires_grad", False) or not readable(target) or target.is_floating_point() or scores.device.type != "cpu" or scores.numel() > _LARGEST:
            return
        self.left -= 1
        found = next((seen for shape in sorted(shapes) for way in (shape, shape[::-1]) if (seen := _lengths(scores, target, way[0], turned=way is not shape)) is not None), None)
        if found is None:
            return
        of_results, of_targets, ends = found
        if of_results == of_targets:
            counts = given.get("reduction") != "none" and given.get("weight") is None and given.get("ignore_index", _IGNORED) != ends
            missing = sum(max(of_results) - n for n in of_results)
            self._tell("padding", counts, f"places of padding count in the loss: {missing} of {len(of_results) * max(of_results)} targets are {ends}, which the sequences end in, and of these places the model gives one and the same result")
        else:
            self._tell("sorted", sorted(of_results) == sorted(of_targets), f"results come in another order than their targets: the sequences have lengths {_few(of_results)} in the results and {_few(of_targets)} in the targets")

    def _tell(self, what: str, wrong: bool, seen: str) -> None:
        self._times[what] += wrong
        if wrong and self._times[what] == _TWICE:
            self.sink.number("target", float(_TWICE), kind=Value.KEPT, facts={"what": what, "seen": seen})


def _few(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:_LEAST])) + ", …"


def _lengths(scores: Any, target: Any, sequences: int, *, turned: bool) -> tuple[list[int], list[int], int] | None:
    """Lengths of so many sequences by their results and by their targets, and the number that targets end in; None where they cannot be told.

    Args:
        turned: places come before sequences.
    """
    if target.numel() % sequences or scores.shape[-1] == 0:
        return None
    places = target.numel() // sequences
    with unseen():
        numbers, found = target.detach(), scores.detach()
        if found.dim() == 3 and target.dim() == 2:  # classes are the second dimension
            found = found.transpose(1, 2).reshape(-1, found.shape[1])
        if found.dim() != 2 or found.shape[0] != target.numel() or places < _LEAST:
            return None
        whole = (places, sequences) if turned else (sequences, places)
        rows, results = numbers.reshape(whole), found.reshape(*whole, -1)
        if turned:
            rows, results = rows.t(), results.transpose(0, 1)
        return _both(array_of(rows), results)


def _both(rows: np.ndarray[Any, Any], results: Any) -> tuple[list[int], list[int], int] | None:
    targets, ends = _ended(rows)
    same = array_of((results == results[:, -1:]).all(2))  # as the last place of each sequence
    runs = _runs(same)
    # All that is padded ends in one result.
    padded = np.flatnonzero(runs >= 2)
    if len(padded) < 2 or not bool((results[padded, -1] == results[int(padded[0]), -1]).all()):
        return None
    ending = array_of((results == results[int(padded[0]), -1]).all(2))
    of_results = [int(rows.shape[1] - n) for n in _runs(ending)]
    return (of_results, targets, ends) if targets and min(len(set(of_results)), len(set(targets))) >= _KINDS else None


def _ended(rows: np.ndarray[Any, Any]) -> tuple[list[int], int]:
    """Lengths of rows without the number that most of them end in, and that number; no lengths where they end in none."""
    runs = _runs(rows == rows[:, -1:])
    ends = rows[runs >= 2, -1]
    if len(ends) < 2 or len(set(ends.tolist())) > 1:
        return [], 0
    return [int(rows.shape[1] - n) for n in _runs(rows == ends[0])], int(ends[0])


def _runs(same: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many are true at the end of each row."""
    found: np.ndarray[Any, Any] = np.argmin(np.concatenate([same[:, ::-1], np.zeros((len(same), 1), bool)], 1), 1)
    return found
