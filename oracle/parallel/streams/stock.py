"""The stock stream: bit by bit what plain torch draws on one CPU, and the generator's state afterwards.

torch's CPU generator is one sequence. A rank skips to its elements, lets torch's own kernel draw them, and skips the rest,
so that its generator ends where one device's would: O(local) memory, O(whole) time at a tenth of the cost of drawing.
How many draws an element costs is measured when an operation is first used with a dtype, and whether drawing in parts gives
the same bits is tried: kernels differ between CPUs (MKL's). What does not draw in parts is drawn whole and cut.
`normal_` of 16 elements and more fills blocks of 16 and draws the last 16 again if they are no whole block (in float32 and
float64 after a draw for every element, in half precision after those of the whole blocks); of fewer it keeps a spare value
in the generator. Source: `aten/src/ATen/native/cpu/DistributionTemplates.h`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box, Longs, Runs
from proctor.oracle.parallel.streams import Ident, cuda
from proctor.oracle.parallel.streams.mt19937 import position, skip

BLOCK: Final = 16  # of `normal_`
_WINDOW: Final = 1 << 20  # elements drawn at a time: what a shard of short runs needs beside itself
_GAP: Final = 1 << 12  # elements that are cheaper to draw than to skip
_TRIED: Final = 96  # elements of a trial: six blocks; at 4 draws each below the 624 that `position` can tell


class Habit(NamedTuple):
    """How a kernel draws.

    Args:
        cost: draws of 32 bits an element; 0 when parts do not give the bits of the whole.
        block: elements that are drawn together. With more than one, a tensor that is no whole number of blocks has its
            last `block` elements drawn again.
        every: whether that happens after a draw for every element; else after those of the whole blocks.
    """

    cost: int
    block: int = 1
    every: bool = True

    def tail(self, size: int) -> tuple[int, int]:
        """Of a tensor of `size` elements: the first that is drawn again (`size` for none), and the draws before that / cost."""
        if size % self.block == 0:
            return size, size
        return size - self.block, size if self.every else size // self.block * self.block


class Window(NamedTuple):
    """Elements [start, stop) of the whole that are drawn at once, and which of them are ours.

    Args:
        start: of the first element.
        stop: after the last.
        held: [N] our elements, counted from `start`.
        offsets: [N] where they go in the shard.
    """

    start: int
    stop: int
    held: Longs
    offsets: Longs


class Stock:
    """See the module.

    Args:
        generator: stands where one device's would, and is moved on.
    """

    kind = "stock"

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def fill(self, draw: Any, out: torch.Tensor, box: Box, args: tuple[Any, ...], ident: Ident) -> None:
        """See `Stream.fill`.

        Raises:
            OracleError: a tensor on a GPU of which it is not known how torch draws it.
        """
        if out.is_cuda:
            cuda.fill_stock(self._of(out.device), draw, out, box, args)
            return
        order = memory_order(out)
        dense, box = out.permute(order), box.permuted(order)
        given = tuple(a.expand(out.shape).permute(order) if isinstance(a, torch.Tensor) else a for a in args)
        straight = out.is_contiguous() and order == tuple(range(out.dim()))
        if straight and box.is_whole():
            draw.kernel(out, *args, generator=self.generator)
            return
        habit = habit_of(draw, out.dtype, given) if straight or not draw.blocks else Habit(0)
        if habit.cost == 0 or box.size < habit.block:
            self._drawn_whole(draw, dense, out, box, order, given)
            return
        flat = torch.empty(dense.numel(), dtype=out.dtype)
        flat_args = tuple(a.reshape(-1) if isinstance(a, torch.Tensor) else a for a in given)
        self._drawn_in_parts(draw, flat, box, flat_args, habit)
        dense.copy_(flat.view(dense.shape))

    def _of(self, device: torch.device) -> torch.Generator:
        """The device's own: `generator` is of the CPU."""
        if self.generator is not torch.default_generator:
            raise OracleError("the stock stream draws on a GPU by the process's own generator, and a rank that is a thread has none", hint='give rng="keyed"')
        found: torch.Generator = torch.cuda.default_generators[device.index or 0]
        return found

    def whole(self, draw: Any, shape: tuple[int, ...], dtype: torch.dtype, args: tuple[Any, ...], ident: Ident) -> torch.Tensor:
        """See `Stream.whole`."""
        out = torch.empty(shape, dtype=dtype)
        draw.kernel(out, *args, generator=self.generator)
        return out

    def _drawn_whole(
        self, draw: Any, dense: torch.Tensor, out: torch.Tensor, box: Box, order: tuple[int, ...], args: tuple[Any, ...]
    ) -> None:
        """Draw all of it and keep our part; the tensor lies in memory as one device's would."""
        full = torch.empty(box.shape, dtype=out.dtype)
        back = tuple(np.argsort(order))
        where = np.ix_(*box.indices) if box.indices else ()
        drawn = []
        for a in args:
            if isinstance(a, torch.Tensor):
                spread = torch.zeros(box.shape, dtype=a.dtype)
                spread[where] = a
                a = spread.permute(back)
            drawn.append(a)
        draw.kernel(full.permute(back) if full.dim() else full, *drawn, generator=self.generator)
        dense.copy_(full[where] if box.indices else full)

    def _drawn_in_parts(self, draw: Any, flat: torch.Tensor, box: Box, args: tuple[Any, ...], habit: Habit) -> None:
        size, at = box.size, 0
        tail, before = habit.tail(size)
        for window in windows(_before(box.runs().sorted(), tail), habit.block):
            skip(self.generator, (window.start - at) * habit.cost)
            _draw(draw, flat, window, args, self.generator)
            at = window.stop
        skip(self.generator, (before - at) * habit.cost)
        if tail < size:
            ours = _after(box.runs().sorted(), tail)
            _draw(draw, flat, Window(tail, size, ours[0] - tail, ours[1]), args, self.generator)


def _draw(draw: Any, flat: torch.Tensor, window: Window, args: tuple[Any, ...], generator: torch.Generator) -> None:
    buffer = torch.empty(window.stop - window.start, dtype=flat.dtype)
    held, offsets = torch.from_numpy(window.held), torch.from_numpy(window.offsets)
    drawn = []
    for a in args:
        if isinstance(a, torch.Tensor):
            spread = torch.zeros(len(buffer), dtype=a.dtype)
            spread[held] = a[offsets]
            a = spread
        drawn.append(a)
    draw.kernel(buffer, *drawn, generator=generator)
    flat[offsets] = buffer[held]


def windows(runs: Runs, block: int) -> Iterator[Window]:
    """Sorted runs, cut and joined to windows of whole blocks; small gaps are drawn, large ones left out."""
    pieces = _cut(runs, _WINDOW)
    if not len(pieces.starts):
        return
    low = pieces.starts // block * block
    high = -(-(pieces.starts + pieces.lengths) // block) * block
    ends = np.flatnonzero((low[1:] - high[:-1] > _GAP) | (low[1:] // _WINDOW != low[:-1] // _WINDOW)) + 1
    for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(low)]):
        group = Runs(pieces.starts[first:end], pieces.lengths[first:end], pieces.offsets[first:end])
        held, offsets = _elements(group)
        yield Window(int(low[first]), int(high[end - 1]), held - low[first], offsets)


def _cut(runs: Runs, most: int) -> Runs:
    """Sorted runs, none of which crosses a multiple of `most`: blocks of two windows never overlap there."""
    crossing = runs.starts // most != (runs.starts + runs.lengths - 1) // most
    if not crossing.any():
        return runs
    parts = []
    for start, length, offset in zip(*(column[crossing].tolist() for column in runs)):
        at = start
        while at < start + length:
            end = min(start + length, (at // most + 1) * most)
            parts.append((at, end - at, offset + at - start))
            at = end
    more = np.array(parts, np.int64).T
    return Runs(*(np.concatenate([column[~crossing], cut]) for column, cut in zip(runs, more))).sorted()


def _elements(runs: Runs) -> tuple[Longs, Longs]:
    """Global and local index of every element of the runs."""
    within = np.arange(int(runs.lengths.sum()), dtype=np.int64)
    within -= np.repeat(np.cumsum(runs.lengths) - runs.lengths, runs.lengths)
    return np.repeat(runs.starts, runs.lengths) + within, np.repeat(runs.offsets, runs.lengths) + within


def _before(runs: Runs, end: int) -> Runs:
    """The part of the runs before an element."""
    lengths = np.minimum(runs.lengths, end - runs.starts)
    some = lengths > 0
    return Runs(runs.starts[some], lengths[some], runs.offsets[some])


def _after(runs: Runs, begin: int) -> tuple[Longs, Longs]:
    """Global and local index of the elements from `begin` on."""
    some = runs.starts + runs.lengths > begin
    held, offsets = _elements(Runs(runs.starts[some], runs.lengths[some], runs.offsets[some]))
    return held[held >= begin], offsets[held >= begin]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory: the order in which kernels draw."""
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d)))


_HABITS: Final[dict[tuple[str, torch.dtype, str], Habit]] = {}


def habit_of(draw: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> Habit:
    """Measured once for each operation, dtype and kind of arguments."""
    key = (draw.name, dtype, draw.variety(*args))
    if key not in _HABITS:
        _HABITS[key] = _measured(draw, dtype, args)
    return _HABITS[key]


def _measured(draw: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> Habit:
    if not draw.blocks:
        cost = _cost(draw, dtype, args, _TRIED)
        return Habit(cost) if cost and _agrees(draw, dtype, args, Habit(cost)) else Habit(0)
    cost = _cost(draw, dtype, args, _TRIED)
    for habit in (Habit(cost, BLOCK, True), Habit(cost, BLOCK, False)) if cost else ():
        if _agrees(draw, dtype, args, habit):
            return habit
    return Habit(0)


def _cost(draw: Any, dtype: torch.dtype, args: tuple[Any, ...], size: int) -> int:
    """Draws an element; 0 when they are no whole number."""
    generator = torch.Generator().manual_seed(1)
    draw.kernel(torch.empty(size, dtype=dtype), *_trial(args, size), generator=generator)
    each, rest = divmod(position(generator), size)
    return 0 if rest else each


def _agrees(draw: Any, dtype: torch.dtype, args: tuple[Any, ...], habit: Habit) -> bool:
    """Whether a draw in parts, each from a generator that skipped to it, has the bits and the end of the whole draw."""
    size = _TRIED - (5 if habit.block > 1 else 0)
    whole, there = torch.empty(size, dtype=dtype), torch.Generator().manual_seed(1)
    draw.kernel(whole, *_trial(args, size), generator=there)
    parts, (tail, before) = torch.empty(size, dtype=dtype), habit.tail(size)
    cuts = [0, 3, 4, 37, size] if habit.block == 1 else [0, 16, 64, size // BLOCK * BLOCK]
    for begin, end in itertools.pairwise(cuts):
        generator = torch.Generator().manual_seed(1)
        skip(generator, begin * habit.cost)
        draw.kernel(parts[begin:end], *_trial(args, end - begin), generator=generator)
    if tail < size:
        generator = torch.Generator().manual_seed(1)
        skip(generator, before * habit.cost)
        draw.kernel(parts[tail:], *_trial(args, size - tail), generator=generator)
    return torch.equal(whole, parts) and position(generator) == position(there)


def _trial(args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    return tuple(torch.full((size,), 0.5, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
