"""Which elements of which parameter an optimizer's flat tensor holds, found by content.

ZeRO keeps its master weights as flat shards that are no module's parameters. Before the first update they equal the
parameters they were copied from, so the place of each run of elements can be found by looking for it. Values that
appear in several places (zeros, ones) are placed by their gradients, where the optimizer was given the parameter's own,
else by what lies around them; a place that gradients contradict is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

WINDOW: Final = 8  # elements that must agree for a place to count
MAX_TRIES: Final = 64


class Span(NamedTuple):
    """`flat[at : at + stop - start]` is `parameter.flatten()[start:stop]`."""

    name: str
    start: int
    stop: int
    at: int


class Gradients(NamedTuple):
    """Of the optimizer's flat tensors, and of the parameters, as they are before the first update.

    Args:
        flats: one for each flat tensor, or `None`.
        parameters: flattened, by name; those that have none are left out.
    """

    flats: Sequence[np.ndarray | None]
    parameters: Mapping[str, np.ndarray]


def find_spans(
    flats: Sequence[np.ndarray], parameters: Mapping[str, np.ndarray], gradients: Gradients | None = None
) -> list[list[Span]]:
    """Place the elements of an optimizer's flat tensors.

    Args:
        flats: each of shape (n,), float32 or float64, in the optimizer's order.
        parameters: flattened values by name, cast to the same type, in the order of the model.
        gradients: of both, where there are some.

    Returns:
        for each flat tensor spans that do not overlap in it; elements that were found nowhere (padding) are in none.
    """
    anchors = _Anchors(parameters)
    found = [_by_content(flat, parameters, anchors) for flat in flats]
    trusted = False
    if gradients is not None:
        told = [_agrees(s, i, gradients) for i, spans in enumerate(found) for s in spans]
        trusted = told.count(True) > told.count(False)
        if trusted:
            others = _Anchors(gradients.parameters)
            for i, flat in enumerate(flats):
                found[i] = sorted((*found[i], *_by_gradient(i, flat, found[i], parameters, gradients, others)), key=lambda s: s.at)
    certain = {id(s) for spans in found for s in spans}
    taken = {s.name for spans in found for s in spans}
    order = list(parameters)
    index = {name: i for i, name in enumerate(order)}
    steps = [index[b.name] - index[a.name] for a, b in itertools.pairwise(itertools.chain.from_iterable(found))]
    way = -1 if sum(s < 0 for s in steps) > len(steps) / 2 else 1  # buckets may be filled from the model's end
    last = -1  # index of the parameter that was placed last
    for flat, spans in zip(flats, found, strict=True):
        if spans:
            spans[:] = _with_constants(spans, flat, parameters, order, taken, way)
        elif (name := _next_constant(flat, parameters, order[last + 1 :], taken)) is not None:
            spans.append(Span(name, 0, flat.size, 0))
            taken.add(name)
        if spans:
            last = index[spans[-1].name]
    if gradients is not None and trusted:
        for i, spans in enumerate(found):
            spans[:] = [s for s in spans if id(s) in certain or _agrees(s, i, gradients) is not False]
    return found


def _agrees(span: Span, flat: int, gradients: Gradients) -> bool | None:
    """Whether gradients say that a span is right; `None` where they say nothing."""
    held, whole = gradients.flats[flat], gradients.parameters.get(span.name)
    if held is None or whole is None:
        return None
    here, there = held[span.at : span.at + span.stop - span.start], whole[span.start : span.stop]
    return None if not here.any() and not there.any() else bool(np.array_equal(here, there))


def _by_gradient(
    flat: int, values: np.ndarray, spans: Sequence[Span], parameters: Mapping[str, np.ndarray], gradients: Gradients, anchors: _Anchors
) -> list[Span]:
    """Spans in the holes that values left, where gradients are those of a parameter and the values are not against it."""
    held = gradients.flats[flat]
    if held is None:
        return []
    out: list[Span] = []
    starts = [0, *(s.at + s.stop - s.start for s in spans)]
    for start, stop in zip(starts, [*(s.at for s in spans), values.size], strict=True):
        if stop <= start:
            continue
        for s in _by_content(held[start:stop], gradients.parameters, anchors):
            at = start + s.at
            if np.array_equal(values[at : at + s.stop - s.start], parameters[s.name][s.start : s.stop]):
                out.append(s._replace(at=at))
    return out


def _by_content(flat: np.ndarray, parameters: Mapping[str, np.ndarray], anchors: _Anchors) -> list[Span]:
    spans: list[Span] = []
    at, tries = 0, 0
    while at < flat.size and tries < MAX_TRIES + 4 * len(parameters):
        tries += 1
        place = anchors.find(flat, at)
        if place is None:
            break
        position, name, offset = place
        values = parameters[name]
        back = 0  # constant elements before the anchor belong to the same parameter as long as they agree
        floor = spans[-1].at + spans[-1].stop - spans[-1].start if spans else 0
        while position - back > floor and offset - back > 0 and flat[position - back - 1] == values[offset - back - 1]:
            back += 1
        position, offset = position - back, offset - back
        length = min(flat.size - position, values.size - offset)
        differs = np.flatnonzero(flat[position : position + length] != values[offset : offset + length])
        length = int(differs[0]) if differs.size else length
        spans.append(Span(name, offset, offset + length, position))
        at = position + length
    return spans


def _next_constant(flat: np.ndarray, parameters: Mapping[str, np.ndarray], names: Sequence[str], taken: set[str]) -> str | None:
    """The next parameter in the model's order that is one value throughout, and that this tensor can be a copy of."""
    for name in names:
        values = parameters[name]
        if name not in taken and values.size == flat.size and bool((values == flat).all()):
            return name
    return None


class _Anchors:
    """Where windows of values begin, for windows that are not constant."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._parameters = parameters
        names = list(parameters)
        first = [parameters[n] for n in names]
        self._all = np.concatenate(first) if first else np.zeros(0)
        self._starts = np.cumsum([0, *(v.size for v in first)])
        self._names = names
        self._order = np.argsort(self._all, kind="stable")
        self._sorted = self._all[self._order]

    def find(self, flat: np.ndarray, at: int) -> tuple[int, str, int] | None:
        """The next element from `at` on that has a place: (index in flat, parameter, offset)."""
        for position in range(at, flat.size):
            value = flat[position]
            if value == 0 or (position + 1 < flat.size and flat[position + 1] == value):
                continue
            low, high = np.searchsorted(self._sorted, [value, value], side="left")[0], np.searchsorted(self._sorted, value, side="right")
            best: tuple[int, int] | None = None
            for place in self._order[low : min(high, low + 64)]:
                p = int(np.searchsorted(self._starts, place, side="right")) - 1
                offset = int(place - self._starts[p])
                values = self._parameters[self._names[p]]
                n = min(WINDOW, flat.size - position, values.size - offset)
                agree = bool(np.array_equal(flat[position : position + n], values[offset : offset + n]))
                if agree and (n >= WINDOW or n == flat.size - position or offset + n == values.size) and n > 1 and (best is None or n > best[1]):
                    best = (int(place), n)
            if best is not None:
                p = int(np.searchsorted(self._starts, best[0], side="right")) - 1
                return position, self._names[p], int(best[0] - self._starts[p])
        return None


def _with_constants(
    spans: list[Span], flat: np.ndarray, parameters: Mapping[str, np.ndarray], order: Sequence[str], taken: set[str], way: int
) -> list[Span]:
    """Fill the holes between, before and after spans with parameters of one value that stand there in the model's order."""
    index = {name: i for i, name in enumerate(order)}
    out: list[Span] = []
    for span in (*spans, None):
        start = out[-1].at + out[-1].stop - out[-1].start if out else 0
        stop = span.at if span is not None else flat.size
        if stop > start:
            if out:
                out += _run(start, stop, index[out[-1].name] + way, way, flat, parameters, order, taken)
            elif span is not None and span.start == 0:
                mirrored = _run(0, stop, index[span.name] - way, -way, flat[:stop][::-1], parameters, order, taken)
                out += [
                    Span(s.name, parameters[s.name].size - s.stop, parameters[s.name].size - s.start, stop - s.at - (s.stop - s.start))
                    for s in reversed(mirrored)
                ]
        if span is not None:
            out.append(span)
    taken.update(s.name for s in out)
    return out


def _run(
    start: int, stop: int, first: int, way: int, flat: np.ndarray, parameters: Mapping[str, np.ndarray], order: Sequence[str], taken: set[str]
) -> list[Span]:
    """Constant parameters one after the other from a place in the model's order; the last one may be cut off."""
    out: list[Span] = []
    i, at = first, start
    while at < stop and 0 <= i < len(order):
        values = parameters[order[i]]
        length = min(values.size, stop - at)
        whole = length == values.size
        if (order[i] in taken and whole) or not bool((flat[at : at + length] == values[:length]).all()):
            break
        if not bool((values == values[0]).all()):
            break
        out.append(Span(order[i], 0, length, at))
        at, i = at + length, i + way
    return out
