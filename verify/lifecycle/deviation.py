"""Which ranks are unlike the others, and along which mesh axis: by majority over the ranks that were compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proctor.invariants.verdict import Violation
from proctor.verify.incident import deviating
from proctor.verify.wording import clean, ranges

Coords = Mapping[int, Mapping[str, int]]
"""Coordinates of each rank on the axes of the program's mesh."""

_SIDES: Final = 4  # groups of ranks named where none is the majority
WORLD: Final = "world"
PART: Final = "group"


@dataclass(frozen=True)
class Deviation:
    """How ranks differ.

    minority: the ranks that are unlike the majority; all that were compared where there is none.
    words: `3 of 64: 17, 18, 40`, `ranks 0 and 1 differ`, `seen on 1 of 8: 3` where ranks were not compared; "" when
        ranks have nothing to do with it.
    axis: along which they differ, `dp`, or `dp×tp`; "" when no mesh is known.
    scope: for a dedup key: the axis, `world` or `group`. Names no rank.
    """

    minority: tuple[int, ...] = ()
    words: str = ""
    axis: str = ""
    scope: str = WORLD


def deviation(v: Violation, ranks: int, coords: Coords) -> Deviation:
    """How the ranks of a violation differ.

    Args:
        v: the violation.
        ranks: that were recorded.
        coords: as far as they are known.
    """
    few = tuple(sorted(deviating(v, ranks)))
    if len(v.sides) < 2:
        return Deviation(few, f"seen on {len(few)} of {ranks}: {ranges(few)}" if few else "")
    compared = sorted(rank for side in v.sides for rank in side)
    axis = axis_of(v.sides, coords)
    return Deviation(
        minority=few or tuple(compared),
        words=_words(v.sides, few, len(compared)),
        axis=axis,
        scope=axis or (WORLD if len(compared) >= ranks else PART),
    )


def axis_of(sides: Sequence[Sequence[int]], coords: Coords) -> str:
    """The axis along which ranks that disagree differ; several joined by ×, "" where coordinates are not known.

    Args:
        sides: ranks that agree, in groups.
        coords: of each rank.
    """
    side_of = {rank: i for i, side in enumerate(sides) for rank in side}
    known = [coords.get(rank) for rank in side_of]
    first = known[0] if known else None
    if not first or any(c is None or c.keys() != first.keys() for c in known):
        return ""
    varying = [axis for axis in first if len({coords[rank][axis] for rank in side_of}) > 1]
    if len(varying) > 1:  # where ranks that are equal on all other axes disagree
        parted = [axis for axis in varying if _parts(axis, side_of, coords)]
        varying = parted or varying
    return clean("×".join(varying), 60)


def _parts(axis: str, side_of: Mapping[int, int], coords: Coords) -> bool:
    lines: dict[tuple[tuple[str, int], ...], set[int]] = defaultdict(set)
    for rank, side in side_of.items():
        lines[tuple(sorted((a, c) for a, c in coords[rank].items() if a != axis))].add(side)
    return any(len(seen) > 1 for seen in lines.values())


def _words(sides: Sequence[Sequence[int]], few: Sequence[int], compared: int) -> str:
    if few:
        return f"{len(few)} of {compared}: {ranges(few)}"
    if compared == 2:
        return "ranks {} and {} differ".format(*sorted(rank for side in sides for rank in side))
    if all(len(side) == 1 for side in sides):
        return f"all {compared} ranks differ"
    named = [f"ranks {ranges(side, 6)}" if len(side) > 1 else f"rank {side[0]}" for side in sides[:_SIDES]]
    more = f" and {len(sides) - _SIDES} more groups" if len(sides) > _SIDES else ""
    return f"no majority of {compared}: {' against '.join(named)}{more}"
