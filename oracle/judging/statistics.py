"""What five numbers of all elements say of a tensor that was recorded as sums over tiles: norm, mean, extremes, how many are not finite.

Two tensors with ‖C - R‖ ≤ T have norms that differ by T at most, extremes too, and sums by √n·T. So the tolerance that the sketch has
bounds all of them, and none is set by hand. They see what the sketch does not: an error that is orthogonal to its signs in every tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from proctor.oracle.judging.verdicts import TensorVerdict
from proctor.oracle.merging.assemble import PARTIAL, Assembler
from proctor.oracle.merging.averages import MEAN
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.tiles import reduction, summed

_TAIL: Final = 4.0  # of T, for the extremes and the sum: T is an estimate of the norm, these are single numbers
_SETTLED: Final = frozenset({"ok", "warn"})

FORWARDS_NOT_SEEN: Final = (
    "what statistics cannot see: an error that cancels within every tile and leaves norm, mean and extremes as they are, such as elements that change places within a tile. "
    "Without --statistics all of that is looked at"
)
NOT_SEEN: Final = (
    "what statistics cannot see: an error that cancels within every tile and leaves norm, mean and extremes as they are, such as elements that change places within a tile; "
    "the scale of one head or shard below the noise of the whole; elements whose gradient is noise; the norm that clipping took; masters that are not the weights. "
    "No module was fed the reference's values: the culprit is where the runs part first. Without --statistics all of that is looked at"
)


class Statistics:
    """Of a candidate against those of a reference.

    Args:
        reference: trusted.
        assembler: of the candidate.
    """

    def __init__(self, reference: Reference, assembler: Assembler) -> None:
        self._reference, self._assembler = reference, assembler

    def judge(self, key: Key, found: TensorVerdict) -> TensorVerdict:
        """A verdict by the sketch, with what the numbers say of a tensor that seems right."""
        theirs = self._reference.entries[key]
        if not theirs.tile or not theirs.stats or found.verdict not in _SETTLED or self._assembler.scale(key[2], key[4]) != 1.0:
            return found
        mine = self._together(key)
        if mine is None or mine[0] != theirs.stats[0]:
            return found
        allowed = found.abs_err / found.ratio if found.ratio > 0 and math.isfinite(found.ratio) else 0.0
        note, ratio = _off(mine, theirs.stats, allowed)
        if not note:
            return found
        return msgspec.structs.replace(found, verdict="nonfinite" if math.isinf(ratio) else "bad", ratio=ratio, note=note)

    def _together(self, key: Key) -> tuple[float, ...] | None:
        """Numbers of the candidate's tensor from those of its shards; `None` where they are addends, or nobody knows where they lie."""
        merged = self._assembler.merge(key)
        if merged is None or merged.conflicts or any(p.places is None or p.addend or p.kept is not None or p.label in (PARTIAL, MEAN) for p in merged.pieces):
            return None
        parts = {tuple(i.tobytes() for i in p.places or ()): p.entry.stats for p in merged.pieces}
        if not all(parts.values()):
            return None
        return summed(parts.values())


def _off(mine: Sequence[float], theirs: Sequence[float], allowed: float) -> tuple[str, float]:
    """In what way numbers differ by more than a tolerance of the norm allows, and by how much of it; "" where they do not."""
    if mine[5] != theirs[5]:
        return f"{mine[5]:,.0f} elements are not finite, {theirs[5]:,.0f} of the reference's", math.inf
    tiny = 1e-9 * math.sqrt(theirs[2])  # of sums in float64
    room = max(allowed, tiny)
    n = theirs[0]
    found = [
        ("norm", math.sqrt(mine[2]), math.sqrt(theirs[2]), room),
        ("mean", mine[1] / n, theirs[1] / n, _TAIL * room / math.sqrt(n)),
        ("least element", mine[3], theirs[3], _TAIL * room),
        ("greatest element", mine[4], theirs[4], _TAIL * room),
    ]
    word, a, b, most = max(found, key=lambda f: abs(f[1] - f[2]) / f[3] if f[3] else 0.0)
    off = abs(a - b) / most if most else 0.0
    return (f"its {word} is {a:.6g}, the reference's {b:.6g}, though sums over tiles agree", off) if off > 1 else ("", 0.0)


def note(reference: Reference) -> str:
    """How much of the tensors was recorded."""
    tiled = [e for e in reference.entries.values() if e.tile]
    kept = sum(math.prod(e.shape) for e in tiled)
    of = sum(math.prod(e.shape) * reduction(e.tile) for e in tiled)
    share = f", one number for {of / kept:,.0f} elements" if kept else ""
    return f"statistics only: {len(tiled):,} of {len(reference.entries):,} tensors are sums over tiles{share}, with norm, mean and extremes; the others are small, and whole"

