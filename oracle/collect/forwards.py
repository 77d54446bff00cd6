"""Programs that are looked at for their forwards: inference, and engines that generate for a trainer and get its weights now and then.

There is no update by which steps could be counted. A step is what happens between two changes of the weights, which are seen when the
next forward begins: by an exact sum over the bits of each parameter, since `param.data.copy_` leaves no other trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from proctor.oracle.collect.finding.roots import local_of

if TYPE_CHECKING:
    from proctor.oracle.collect.collector import Collector

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes of an element


class Forwards:
    """Outermost forwards of a process.

    Args:
        collector: is told where a step begins.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._weights: tuple[int, ...] = ()

    def outermost(self, module: nn.Module) -> None:
        """A module is called that no other module called."""
        collector = self._collector
        if not collector.progress.begun:
            collector.begin_with(module)
            self._weights = self._sums()
        elif not collector.models.knows(module):
            return
        elif (found := self._sums()) != self._weights:
            self._weights = found
            collector.synchronised()

    def _sums(self) -> tuple[int, ...]:
        return tuple(_sum(local_of(p.detach())) for _, p in self._collector.models.parameters() if not p.is_meta)


def _sum(x: torch.Tensor) -> int:
    """Of the bits of a tensor, taken as whole numbers, with odd places counted otherwise than even ones."""
    if x.is_complex():
        x = torch.view_as_real(x)
    words = x.contiguous().flatten().view(_WORDS[x.element_size()])
    return int(words.sum(dtype=torch.int64)) + 3 * int(words[::2].sum(dtype=torch.int64))
