"""Where what a function is given begins in the tensor that it is cut from: used by `manners.py`.

`x[:, 1:]` begins behind the beginning of `x`, `x[:, :-1]` where `x` begins. Told of dimensions that are cut at the same place in each call: a batch that is cut from all data begins at another place
each time, and so does a random crop. Calls without gradients do not count: an evaluation may cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

BEHIND: Final = "it begins behind the beginning of what it is cut from"
AT: Final = "it begins where what it is cut from begins"
_WHOLE: Final = -1  # a dimension that is not cut
_VARIED: Final = -2
_ENOUGH: Final = 8  # calls, fewer may cut at one place by chance


class Cuts:
    """Places at which each argument of a function was cut."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, list[int]]] = {}  # calls, and the place in each dimension

    def told(self, function: str, given: list[tuple[str, Any, int]]) -> Iterator[tuple[str, str, str]]:
        """Take what a call is given, `(name, tensor, fingerprint)`; behind several calls: name, what is true, what is not."""
        import torch

        for name, tensor, _ in given if torch.is_grad_enabled() else ():
            key = function, name
            begins = _begins(tensor)
            calls, known = self._seen.get(key, (0, begins))
            if begins is None or known is None or len(begins) != len(known):
                known = []
            else:
                known = [old if old == new else _VARIED for old, new in zip(known, begins, strict=True)]
            self._seen[key] = calls + 1, known
            cut = [place for place in known if place not in (_WHOLE, _VARIED)]
            if calls + 1 >= _ENOUGH and cut:
                yield (name, BEHIND, AT) if any(cut) else (name, AT, BEHIND)


def _begins(tensor: Any) -> list[int] | None:
    """Of each dimension, where a view begins in what it is cut from; None of what is no such view."""
    base = tensor._base
    if base is None or not base.is_contiguous() or base.stride() != tensor.stride() or base.dtype != tensor.dtype:
        return None
    offset, places = tensor.storage_offset() - base.storage_offset(), []
    if offset < 0:
        return None
    for stride, whole, size in zip(base.stride(), base.shape, tensor.shape, strict=True):
        place, offset = divmod(offset, max(stride, 1))
        if place + size > whole:
            return None
        places.append(place if size < whole else _WHOLE)
    return places
