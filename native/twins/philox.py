"""`philox.h` in numpy: oracle of the native one, and what runs where it was not built. Every result has the native one's bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_M0: Final = np.uint64(0xD2511F53)
_M1: Final = np.uint64(0xCD9E8D57)
_W0: Final = 0x9E3779B9
_W1: Final = 0xBB67AE85
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10
_CHUNK: Final = 1 << 14  # blocks at a time: what a round reads and writes stays in the second-level cache
_NORMAL: Final = 2  # the domain of the words that normal numbers are made of

_LOG: Final = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_SIN: Final = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS: Final = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def philox_words(key: int, starts: Longs, length: int, each: int, domain: int, out: npt.NDArray[Any]) -> None:
    """Random words of stretches of positions.

    Args:
        key: 64 bits.
        starts: [N] first position of each stretch, int64.
        length: of every stretch.
        each: words for one position: 1, 2 or 4.
        domain: 32 bits; other domains of a key are other streams.
        out: [N, length, each] uint32, contiguous; overwritten.

    Raises:
        ValueError: another type or shape.
    """
    _agree(starts, each, len(starts) * length * each, out)
    begin, count = starts * each, length * each
    first, skip = begin >> 2, begin & 3
    most = (count + 3 + 3) // 4 if skip.any() else -(-count // 4)
    made = _blocks(key, (first[:, None] + np.arange(most)).reshape(-1), domain).reshape(len(starts), most * 4)
    taken = np.take_along_axis(made, skip[:, None] + np.arange(count), 1) if skip.any() else made[:, :count]
    out.reshape(len(starts), count)[:] = taken


def philox_unit(key: int, starts: Longs, length: int, out: npt.NDArray[Any]) -> None:
    """Uniform numbers in [0, 1), 24 random bits each.

    Args:
        key, starts, length: see `philox_words`.
        out: [N, length] float32, contiguous; overwritten.

    Raises:
        ValueError: another type or shape.
    """
    _agree(starts, 1, len(starts) * length, out)
    words = np.empty(out.size, np.uint32)
    philox_words(key, starts, length, 1, 0, words)
    out.reshape(-1)[:] = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def philox_normal(key: int, starts: Longs, length: int, out: npt.NDArray[Any]) -> None:
    """Standard normal numbers by Box and Muller: a pair of words makes a pair of positions.

    Args:
        key, starts, length: see `philox_words`.
        out: [N, length] float32, contiguous; overwritten.

    Raises:
        ValueError: another type or shape.
    """
    _agree(starts, 1, len(starts) * length, out)
    pairs = length // 2 + 1
    words = np.empty((len(starts), pairs, 2), np.uint32)
    philox_words(key, starts & ~1, 2 * pairs, 1, _NORMAL, words)
    radius = np.sqrt(_log(words[..., 0]) * np.float32(-2))
    cosine, sine = _turned(words[..., 1])
    both = np.stack([radius * cosine, radius * sine], -1).reshape(len(starts), 2 * pairs)
    out.reshape(len(starts), length)[:] = np.take_along_axis(both, (starts & 1)[:, None] + np.arange(length), 1)


def _agree(starts: Longs, each: int, count: int, out: npt.NDArray[Any]) -> None:
    if starts.dtype != np.int64 or starts.ndim != 1 or not (len(starts) < 2 or starts.flags.c_contiguous):
        raise ValueError("starts: a plain array of int64 is needed")
    if each not in (1, 2, 4):
        raise ValueError("each: 1, 2 or 4")
    if out.itemsize != 4 or out.size != count or not out.flags.c_contiguous:
        raise ValueError("out: a contiguous array with a place for each result is needed")


def _blocks(key: int, counter: Longs, domain: int) -> Words:
    """[N, 4] random words of the blocks with these counters."""
    out = np.empty((len(counter), 4), np.uint32)
    for at in range(0, len(counter), _CHUNK):
        _rounds(key, counter[at : at + _CHUNK].astype(np.uint64), domain, out[at : at + _CHUNK])
    return out


def _rounds(key: int, counter: npt.NDArray[np.uint64], domain: int, out: Words) -> None:
    c0, c1 = counter & _LOW, counter >> _HALF
    c2 = np.full_like(counter, domain)
    c3 = np.zeros_like(counter)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = c0, c1, c2, c3


def _log(words: Words) -> Floats:
    """Logarithm of ((word >> 8) + 1) / 2^24, which is in (0, 1]: see `philox.cpp`."""
    bits = ((words >> np.uint32(8)) + np.uint32(1)).astype(np.float32).view(np.int32)
    power = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    m = (bits - (power << np.int32(23))).view(np.float32) - np.float32(1)
    whole, mm = (power - np.int32(24)).astype(np.float32), m * m
    p = _horner(_LOG, m) * m * mm + whole * np.float32(-2.12194440e-4) + mm * np.float32(-0.5)
    found: Floats = m + p + whole * np.float32(0.693359375)
    return found


def _turned(words: Words) -> tuple[Floats, Floats]:
    """Cosine and sine of (word >> 8) / 2^24 of a turn."""
    turn = (words >> np.uint32(8)).astype(np.int32)
    quarter = (turn + np.int32(1 << 21)) >> np.int32(22)
    x = (turn - (quarter << np.int32(22))).astype(np.float32) * np.float32(2.0**-22) * np.float32(1.57079632679489662)
    z = x * x
    s = _horner(_SIN, z) * z * x + x
    c = _horner(_COS, z) * z * z + z * np.float32(-0.5) + np.float32(1)
    odd = (quarter & 1).astype(bool)
    cosine, sine = np.where(odd, s, c), np.where(odd, c, s)
    return np.where((quarter + 1) & 2, -cosine, cosine), np.where(quarter & 2, -sine, sine)


def _horner(factors: tuple[float, ...], x: Floats) -> Floats:
    value = np.full_like(x, factors[0])
    for factor in factors[1:]:
        value = value * x + np.float32(factor)
    return value
