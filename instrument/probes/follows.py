"""Whether targets follow their samples when an order is drawn anew.

A row of `Value.KEPT`, `follows`, once: the targets of the losses come batch by batch as they came in the pass before, at least four different ones, while the samples that the model is given are those of the pass before in another order. Then
the samples were shuffled alone, and each has another's target. Told where eight batches in a row show it, or a pass of at least four. Samples that are changed at random in each pass (augmentation, noise) do not come again, and
targets that are one throughout (episodes whose classes are numbered anew, pairs on a diagonal) are no order. Of each sample the first numbers are looked at; zeros at its end, which pad it, do not count.
Only tensors on the CPU. Cost: 50 µs a batch, of the first 512, until one is the same as in the pass before; a step looks at its first calls of models alone, and a program whose losses are its own is left alone after 64 steps.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes.judged import bits, readable, tensors
from proctor.instrument.probes.source.formulas import is_loss_of_torch
from proctor.invariants.schema import MODEL_CALL, Value

_BATCHES: Final = 512
_CALLS: Final = 4  # of models that a step looks at, until it has samples: a solver calls its model hundreds of times
_STEPS: Final = 64  # without a loss that is known
_SAMPLES: Final = 1 << 17  # that are remembered
_NUMBERS: Final = 64  # of a sample
_FEWEST: Final = 8  # samples of a batch
_PASS: Final = 4  # batches
_IN_A_ROW: Final = 8
_KNOWN: Final = 0.9  # of the samples of a batch
_FIXED: Final = np.random.default_rng(7).integers(1 << 62, size=_NUMBERS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@register
class Follows(Probe):
    """Orders of samples and of targets."""

    name = "follows"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._samples: np.ndarray[Any, Any] | None = None  # of the call that runs, a key each
        self._orders: list[tuple[int, int]] = []  # of each batch: its targets and its samples, in their order
        self._known: dict[int, int] = {}  # samples and the batch that they came in last
        self._last: dict[int, int] = {}  # targets and the batch that they came in last
        self._period = self._times = 0
        self._left = _CALLS

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if home is Home.TORCH and is_loss_of_torch(function):
            return self._lost, None
        return NO_HOOKS

    def thinned(self) -> None:
        self._ends()

    def _ends(self) -> None:
        self.over, self._samples, self._orders, self._known, self._last = True, None, [], {}, {}

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._left <= 0 or self._samples is not None or self.over or not getattr(args[0], "training", False):
            return
        if not torch.is_grad_enabled() or next(plainly.parameters(args[0]), None) is None:
            return
        self._left -= 1
        given = next(iter(tensors([*args[1:], *(kwargs or {}).values()])), None)
        # A model may be called in parts: what was computed is given to the next one, and is no sample.
        if given is not None and not given.requires_grad and given.dim() >= 2 and given.shape[0] >= _FEWEST:
            self._samples = _keys(given)

    def step_begins(self, step: int) -> None:
        self._samples, self._left = None, _CALLS
        if step >= _STEPS and not self._orders and not self.over:
            self._ends()

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        target: Any = args[1] if len(args) > 1 else (kwargs or {}).get("target")
        samples, self._samples, self._left = self._samples, None, _CALLS
        if samples is None or not readable(target) or target.shape[0] != len(samples):
            return
        now, targets, order = len(self._orders), _one(_keys(target)), _one(samples)
        before, self._last[targets] = self._last.get(targets), now
        period = now - before if before is not None else 0
        keys = samples.tolist()
        came = sum(now - self._known.get(key, now) > 0 for key in keys)
        self._orders.append((targets, order))
        self._known.update(dict.fromkeys(keys, now))
        if period and self._orders[now - period][1] == order:
            self._ends()  # the same batch again: nothing is shuffled, or all together
            return
        right = period >= _PASS and came >= _KNOWN * len(keys) and 2 * len({t for t, _ in self._orders[-period:]}) >= max(period, 2 * _PASS)
        self._times = (self._times + 1 if period == self._period else 1) if right else 0
        self._period = period
        if self._times >= min(_IN_A_ROW, period) > 0:
            seen = f"the targets come in the order of the pass before, {period} batches ago, and the samples in another one: they are shuffled without their targets"
            self.sink.number("target", float(period), kind=Value.KEPT, facts={"what": "follows", "seen": seen})
            self._ends()
        elif now + 1 >= _BATCHES or len(self._known) > _SAMPLES:
            self._ends()


def _keys(tensor: Any) -> np.ndarray[Any, Any]:
    """A number for each row; zeros at its end make no difference."""
    rows = bits(tensor.detach().reshape(tensor.shape[0], -1)[:, :_NUMBERS]).reshape(tensor.shape[0], -1)
    with np.errstate(over="ignore"):
        mixed = ((rows ^ (rows >> np.uint64(29))) * _FIXED[: rows.shape[1]]).sum(axis=1, dtype=np.uint64)
    found: np.ndarray[Any, Any] = mixed
    return found


def _one(keys: np.ndarray[Any, Any]) -> int:
    """A number for keys in their order."""
    return hash(keys.tobytes())
