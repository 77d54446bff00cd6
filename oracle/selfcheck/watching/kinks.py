"""Gradients at an edge: where a unit of a ReLU or a maximum lies within rounding of its kink, rounding alone turns it, and its gradient jumps.

Four samples of noise of one rounding may all leave such a unit where it is. Before a gradient is told, louder noise is drawn: what that moves as far is no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from proctor.oracle.selfcheck import Unknown
from proctor.oracle.selfcheck.watching.step import MULTIPLE, SAMPLES, Call, Gap
from proctor.oracle.selfcheck.watching.values import difference

LOUD: Final = 8.0  # roundings: those of the layers before add up at the edge
MORE: Final = 8  # samples


def refuse_kinks(call: Call, found: Mapping[str, torch.Tensor], worst: Gap, run: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Nothing, unless noise moves a gradient as far as it is off.

    Args:
        call: of the model.
        found: gradients, the trusted ones.
        worst: how far one of them is off.
        run: computes them.

    Raises:
        Unknown: it does.
    """
    if worst.name not in found:
        return
    off = worst.error * difference(found[worst.name], found[worst.name])[1]
    for sample in range(SAMPLES, SAMPLES + MORE):
        moved = call.shaken(run, sample, LOUD).get(worst.name)
        if moved is not None and MULTIPLE * difference(found[worst.name], moved)[0] >= off:
            raise Unknown(f"the gradient of {worst.name} is at a kink (a ReLU or a maximum): noise of a few roundings moves it as far as it is off, {worst.error:.2g} of its norm")
