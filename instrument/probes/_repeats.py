"""Whether what a function is given comes again: in the next call, or as the second half of the same tensor. Used by `manners.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

ANOTHER: Final = "it is another than in the call before"
_SOME: Final = 4  # calls that were given the same: fewer may be chance, or one batch that is used twice
_HALVES: Final = {0: "its halves along the first dimension differ", 1: "its halves along the second dimension differ"}


class Repeats:
    """How often each argument of a function was the one of the call before."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int, int]] = {}  # fingerprint, calls, and those given the same as before

    def told(self, function: str, given: list[tuple[str, Any, int]], enough: int) -> Iterator[tuple[str, str, str]]:
        """Take what a call is given, `(name, tensor, fingerprint)`; behind so many calls: name, what is true, what is not."""
        for name, tensor, fp in given:
            last, calls, same = self._seen.get((function, name), (0, 0, 0))
            calls, same = calls + 1, same + (calls > 0 and fp == last)
            self._seen[function, name] = fp, calls, same
            if calls >= enough and tensor.numel() > 1 and (not same or same >= _SOME):
                yield name, "" if same else ANOTHER, ANOTHER if same else ""


def halves(data: Any, has: list[str], lacks: list[str]) -> None:
    """Say of a tensor of varied numbers whether its second half is its first one again, as where one view is joined with itself."""
    for dim, word in _HALVES.items() if data.dim() > 1 else ():
        if data.shape[dim] >= 2 and data.shape[dim] % 2 == 0:
            first, second = data.chunk(2, dim)
            (lacks if bool((first == second).all()) else has).append(word)
