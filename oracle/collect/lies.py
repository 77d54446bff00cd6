"""Where a drawn tensor lies in the reference's, from where the tensors lie that cross the edges of the modules around it.

For draws of which no rule of a plan speaks. A tensor of the reference's shape is the whole. A dimension that is shorter lies as a
dimension of the same place and lengths does in the innermost module that has one; else, as that many heads of so many, it is the
same block as the module's other cut dimensions are. Where those say several things, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from proctor.oracle.parallel.box import Box
from proctor.oracle.store.draws import Extent, Lies

Longs = npt.NDArray[np.int64]


def box_of(local: Sequence[int], whole: Sequence[int], modules: Sequence[str], step: int, lies: Lies | None) -> Box | None:
    """The part of a draw that a rank holds; `None` where that is not known.

    Args:
        local: shape of the rank's tensor.
        whole: shape of the reference's.
        modules: that run, the innermost first, as the reference calls them.
        step: of the run.
        lies: of the rank; `None` where nothing was found out.
    """
    if tuple(local) == tuple(whole):
        return Box.whole(whole)
    if lies is None or len(local) != len(whole):
        return None
    levels = [_within(lies, module, step) for module in modules]
    found: list[Longs | None] = [np.arange(n, dtype=np.int64) if n == m else _same(d, n, m, levels) for d, (n, m) in enumerate(zip(local, whole))]
    rows = {d for d, held in enumerate(found) if held is not None and local[d] != whole[d]}
    for d, (n, m) in enumerate(zip(local, whole)):
        if found[d] is None:
            found[d] = _block(n, m, rows, levels)
    known = [held for held in found if held is not None]
    return Box(tuple(whole), tuple(known)) if len(known) == len(found) else None


def _within(lies: Lies, module: str, step: int) -> list[Extent]:
    """What is known of a module and of what is in it; of a step of which nothing was recorded, what the first step showed."""
    for at in dict.fromkeys((step, 0)):
        inside = [extents for key, extents in lies.extents.items() if _is_in(key, f"{at}/{module}")]
        if inside:
            return [one for extents in inside for one in extents]
    return []


def _is_in(key: str, module: str) -> bool:
    return key == module or key.startswith(module if module.endswith("/") else f"{module}.")


def _same(dim: int, local: int, whole: int, levels: Sequence[Sequence[Extent]]) -> Longs | None:
    for level in levels:
        options = {e.held for e in level if e.dim == dim and e.whole == whole and len(e.held) == 8 * local}
        if options:
            return np.frombuffer(options.pop(), np.int64) if len(options) == 1 else None
    return None


def _block(local: int, whole: int, rows: set[int], levels: Sequence[Sequence[Extent]]) -> Longs | None:
    if not local or whole % local:
        return None
    for level in levels:
        options = {at for e in level if e.dim not in rows and (at := _which(e, whole // local)) is not None}
        if options:
            return np.arange(local, dtype=np.int64) + options.pop() * local if len(options) == 1 else None
    return None


def _which(extent: Extent, parts: int) -> int | None:
    """Which of so many equal blocks; `None` if it is none."""
    held = np.frombuffer(extent.held, np.int64)
    n = len(held)
    if not n or n * parts != extent.whole or held[0] % n or not bool((np.diff(held) == 1).all()):
        return None
    return int(held[0]) // n
