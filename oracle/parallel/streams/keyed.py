"""The keyed stream: element i of a draw is a function of (seed, name, ordinal, i), and of nothing else.

key = 64-bit BLAKE2 hash of (seed, name, ordinal); words by Philox4x32-10 at position i, the row-major index in the whole.
Whoever holds element i computes the same bits: on any mesh, in any order of calls, at a cost of what it holds.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from proctor.oracle.parallel.box import Box, Longs
from proctor.oracle.parallel.streams import Ident, philox
from proctor.oracle.parallel.streams.philox import Words

_CHUNK: Final = 1 << 15  # elements at a time
_LANES: Final = 16  # functions such as log see whole vectors only: no element is in a remainder that is computed otherwise
_UNIT53: Final = 2.0**-53

Floats = npt.NDArray[np.floating[Any]]


class Bits:
    """Random words of some positions of one draw.

    Args:
        key: of the draw.
        starts: [N] first position of each stretch.
        length: of every stretch.
    """

    def __init__(self, key: int, starts: Longs, length: int) -> None:
        self._key, self._starts, self._length = key, starts, length

    @property
    def count(self) -> int:
        """Elements."""
        return len(self._starts) * self._length

    def words(self, each: int = 1, domain: int = 0) -> Words:
        """[count, each]; `each` words an element, of a stream of their own for every `domain`."""
        return philox.words(self._key, self._starts, self._length, each, domain).reshape(-1, each)

    def unit(self, double: bool = False) -> torch.Tensor:
        """[count] uniform in [0, 1): 24 random bits in float32, 53 in float64."""
        return torch.from_numpy(self._unit(double))

    def _unit(self, double: bool) -> Floats:
        if not double:
            return philox.unit(self._key, self._starts, self._length).reshape(-1)
        long: Floats = (_u64(self.words(2, domain=1)) >> np.uint64(11)).astype(np.float64) * _UNIT53
        return long

    def normal(self, double: bool = False) -> torch.Tensor:
        """[count] standard normal, by Box and Muller; in float64 each element from words of its own."""
        if not double:
            return torch.from_numpy(philox.normal(self._key, self._starts, self._length).reshape(-1))
        pair = self.words(4, domain=3)
        u1 = _padded(((_u64(pair[:, :2]) >> np.uint64(11)).astype(np.float64) + 1) * _UNIT53)
        u2 = _padded((_u64(pair[:, 2:]) >> np.uint64(11)).astype(np.float64) * _UNIT53)
        values: Floats = (np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2))[: self.count]
        return torch.from_numpy(values)

    def log_unit(self, double: bool = False) -> torch.Tensor:
        """[count] −log(1 − u): exponential of rate 1."""
        u = _padded(1 - self._unit(double).astype(np.float64))
        values: Floats = -np.log(u)[: self.count]
        return torch.from_numpy(values)

    def below(self, p: float) -> torch.Tensor:
        """[count] true with probability p: where a word is below ⌊p·2³²⌋."""
        most = int(p * 2**32) - 1  # the largest word that gives true
        return torch.from_numpy(self.words()[:, 0] <= np.uint32(most)) if most >= 0 else torch.zeros(self.count, dtype=torch.bool)


def _u64(pair: Words) -> npt.NDArray[np.uint64]:
    return (pair[:, 0].astype(np.uint64) << np.uint64(32)) | pair[:, 1].astype(np.uint64)


def _padded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    out = np.full(-(-len(values) // _LANES) * _LANES, 0.5)
    out[: len(values)] = values
    return out


class Keyed:
    """See the module.

    Args:
        seed: of everything that is drawn.
    """

    kind = "keyed"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def key(self, ident: Ident) -> int:
        """64 bits for one draw."""
        blob = struct.pack("<qq", self.seed, ident.ordinal) + ident.name.encode()
        return int.from_bytes(hashlib.blake2b(blob, digest_size=8).digest(), "little")

    def fill(self, draw: Any, out: torch.Tensor, box: Box, args: tuple[Any, ...], ident: Ident) -> None:
        """See `Stream.fill`."""
        if out.numel() == 0:
            return
        flat = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        given = [a.detach().reshape(-1) if isinstance(a, torch.Tensor) else a for a in args]
        make, chunk = (Bits, _CHUNK) if out.is_cpu else _on(out.device)
        key, runs = self.key(ident), box.runs()
        for length in np.unique(runs.lengths):
            these = np.flatnonzero(runs.lengths == length)
            for starts, offsets, count in _pieces(runs.starts[these], runs.offsets[these], int(length), chunk):
                where = _where(offsets, count)
                now = [a[where] if isinstance(a, torch.Tensor) and a.numel() > 1 else a for a in given]
                flat[where] = draw.keyed(make(key, starts, count), out.dtype, *now).to(out.device, out.dtype)
        out.copy_(flat.view(out.shape))

    def whole(self, draw: Any, shape: tuple[int, ...], dtype: torch.dtype, args: tuple[Any, ...], ident: Ident) -> torch.Tensor:
        """See `Stream.whole`."""
        out = torch.empty(shape, dtype=dtype)
        self.fill(draw, out, Box.whole(shape), args, ident)
        return out


def _on(device: torch.device) -> tuple[Callable[[int, Longs, int], Bits], int]:
    from proctor.oracle.parallel.streams import cuda

    return functools.partial(cuda.DeviceBits, device=device), cuda.CHUNK


def _pieces(starts: Longs, offsets: Longs, length: int, chunk: int) -> list[tuple[Longs, Longs, int]]:
    """Stretches of equal length as pieces of `chunk` elements: several short ones, or a part of a long one."""
    if length > chunk:
        cut = range(0, length, chunk)
        return [
            (starts[i : i + 1] + at, offsets[i : i + 1] + at, min(chunk, length - at)) for i in range(len(starts)) for at in cut
        ]
    rows = max(1, chunk // length)
    return [(starts[at : at + rows], offsets[at : at + rows], length) for at in range(0, len(starts), rows)]


def _where(offsets: Longs, length: int) -> slice | torch.Tensor:
    """Where the pieces lie in the shard; a slice where they are neighbours."""
    if bool((np.diff(offsets) == length).all()):
        return slice(int(offsets[0]), int(offsets[0]) + len(offsets) * length)
    return torch.from_numpy((offsets[:, None] + np.arange(length)).reshape(-1))
