"""Differences that may be chance: another type, or another part of a batch, draws other random numbers, and rounding turns a unit at a kink.

Where a unit of a ReLU or a maximum lies within rounding of its kink, its gradient jumps. Four samples of noise of one rounding may all leave it where it is. Before a
gradient is told, louder noise is drawn, of parameters and inputs, too: a sum of the first layer, or of code without modules, that cancels is turned by no noise of its result. What that
moves as far is no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.selfcheck import Unknown
from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.gaps import MULTIPLE, Gap, gap
from proctor.oracle.selfcheck.watching.step import SAMPLES, Call, Outputs, seeded
from proctor.oracle.selfcheck.watching.values import difference, same_bits

LOUD: Final = 8.0  # roundings: those of the layers before add up at the edge
MORE: Final = 8  # samples
FAINT: Final = 2.0**-24


def draws(call: Call) -> bool:
    """Whether evaluation gives other results with other random numbers."""
    one, other = call.baseline, call.evaluate(seed=1)
    return any(p in other and not same_bits(one[p], other[p]) for p in one)


class OneForAll(TorchDispatchMode):  # type: ignore[misc]
    """What torch draws is the same for all samples of a batch: which of them gets which of it makes no difference then.

    Args:
        size: of the batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The operation's result; of one that draws, that of the first sample for each."""
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(made, torch.Tensor):
            for axis in (a for a in range(made.ndim) if made.size(a) == self.size):
                made.copy_(made.narrow(axis, 0, 1).clone().expand_as(made))
        return made


def draws_in_training(call: Call, whole: Outputs) -> bool:
    """Whether gradients change with the random numbers, torch's, numpy's or Python's."""
    before = call.random
    seeded(7)
    call.random = random_states()
    try:
        other = call.derive()[1]
    finally:
        call.random = before
    return gap(whole, other).ratio > 1e3


def refuse_kinks(call: Call, found: Outputs, worst: Gap, run: Callable[[], Outputs], *, unit: float | None = None) -> None:
    """Nothing, unless noise moves a gradient as far as it is off.

    Args:
        call: of the model.
        found: gradients, the trusted ones.
        worst: how far one of them is off.
        run: computes them.
        unit: of a rounding, where everything runs in float64; that of each tensor's type without. Then noise that is too faint to turn a unit is drawn as well: what
            loud noise moves in proportion is no jump.

    Raises:
        Unknown: it does.
    """
    if worst.name not in found:
        return
    off = worst.error * difference(found[worst.name], found[worst.name])[1]

    def moved(sample: int, loud: float) -> float:
        other = call.shaken(run, sample, loud, leaves=True, unit=unit).get(worst.name)
        return difference(found[worst.name], other)[0] if other is not None else 0.0

    straight = sorted(moved(sample, LOUD * FAINT) for sample in range(SAMPLES))[SAMPLES // 2 - 1] / FAINT if unit is not None else 0.0
    for sample in range(SAMPLES, SAMPLES + MORE):
        jump = moved(sample, LOUD)
        if MULTIPLE * jump >= off and jump > MULTIPLE * straight:
            raise Unknown(f"the gradient of {worst.name} is at a kink (a ReLU or a maximum): noise of a few roundings moves it as far as it is off, {worst.error:.2g} of its norm")
