"""Breaks bytes: flipped bits, cuts, pieces that are moved, doubled or lost, numbers at the edges, and text that parsers stumble over."""

from __future__ import annotations

import random
import struct
from typing import Final

MOST_BYTES: Final = 1 << 20
_TOKENS: Final = [
    b"", b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"9" * 40, b'""', b"[]", b"{}", b"[[[[", b"}}", b'"\\ud800"', b"\xff\xfe", b"\0", b"\n",
    b"../../etc/passwd", b"/dev/zero", b"\xe2\x80\xae", b"'" * 3, b"[" * 2000, b'{"a":' * 500, b"(a+)+b", b".*" * 40, b"%s%n", b"a" * 5000,
]  # fmt: skip
_NUMBERS: Final = [0, 1, -1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63)]


def mutate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A broken version of some bytes.

    Args:
        data: sound.
        rng: decides everything.
        others: sound files, of which pieces may come in.
    """
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(made) + 1)
        _CHANGES[rng.randrange(len(_CHANGES))](made, at, rng, others)
    return bytes(made[:MOST_BYTES])


def _flip(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    if at < len(made):
        made[at] ^= 1 << rng.randrange(8)


def _set(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    if at < len(made):
        made[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def _cut(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    del made[at:]


def _lose(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    del made[at : at + rng.choice((1, 2, 8, 64, 1000))]


def _double(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    made[at:at] = made[at : at + rng.choice((1, 4, 32, 300))] * rng.choice((1, 2, 50))


def _move(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    piece = made[at : at + rng.choice((4, 16, 100))]
    to = rng.randrange(len(made) + 1)
    made[to : to + len(piece)] = piece


def _token(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    made[at : at + rng.choice((0, 0, 1, 5, 20))] = rng.choice(_TOKENS)


def _number(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    number, code = rng.choice(_NUMBERS), rng.choice(("<i", "<q", "<h"))
    size = struct.calcsize(code)
    at -= at % rng.choice((1, 4, 8))
    made[at : at + size] = (number & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def _digits(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    """Another number where one stands in a text."""
    end = at
    while end < len(made) and made[end : end + 1].isdigit():
        end += 1
    if end > at:
        made[at:end] = str(rng.choice(_NUMBERS)).encode()


def _value(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    """Another value behind the next colon or equals sign."""
    found = min((i for i in (made.find(b":", at), made.find(b"=", at)) if i >= 0), default=-1)
    if found >= 0:
        ends = [i for i in (made.find(c, found + 1) for c in (b",", b"}", b"\n", b"]")) if i >= 0]
        made[found + 1 : min(ends, default=len(made))] = rng.choice(_TOKENS)


def _graft(made: bytearray, at: int, rng: random.Random, others: list[bytes]) -> None:
    other = rng.choice(others)
    begin = rng.randrange(len(other) + 1)
    made[at:at] = other[begin : begin + rng.choice((8, 100, 2000))]


_CHANGES: Final = [_flip, _set, _cut, _lose, _double, _move, _token, _number, _digits, _value, _graft, _flip, _value]
