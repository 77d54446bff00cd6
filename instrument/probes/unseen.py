"""Whether an evaluation sees samples that the model was trained on, and whether the batches of the training are put together anew.

Rows of `Value.MANNER`, mode `unseen`, of the first evaluations of each model: its batch `has` none of the samples that were trained on, or `lacks` this, as all of them were. A batch of
which some were says nothing: samples may be alike. A sample is known by some elements of its row in the first tensor that a model is given, on the CPU; one that is constant, as padding is,
does not count. An augmented sample is another one. Mode `holds` of the batches of each model: when samples come again, they come in other batches (`_anew.py`).

Cost: 1 µs a sample of the first 65,536 that are trained on, or of 256 batches of each model, and of 64 batches of evaluations. Where twice as many samples as are known brought none
that is new (a graph that is trained as a whole gives all its nodes in each step), the 64th batch after it is read, the 128th after that, and so on up to one in 4,096; what an evaluation has none of may then have been in the others, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from proctor.instrument.observe import content, plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._anew import ANEW, Anew
from proctor.invariants.schema import MODEL_CALL, Value

NOT_TRAINED: Final = "samples that it was not trained on"
_ELEMENTS: Final = 64  # of a sample
_LEAST: Final = 4  # elements of a sample, and different samples of a batch
_SAMPLES: Final = 1 << 16
_OFTEN: Final = 1 << 12  # samples in a row, at least, that bring none that is new
_SELDOM: Final = 64, 4096  # batches that are passed then before one is read, at first and at most: twice as many after each
_LOOKS: Final = 64
_LARGEST: Final = 1 << 26  # elements of a batch
_MODELS: Final = 16  # whose batches are compared


@register
class Unseen(Probe):
    """Samples of evaluations."""

    name = "unseen"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._trained: set[int] = set()
        self._stale = 0  # samples since the last one that was new
        self._passed = 0  # batches that were not read
        self._gap, self._ahead = 0, 0  # how many are passed between two that are read, and how many of them are left
        self._left = _LOOKS
        self._anew: dict[str, Anew] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._called, None) if function == MODEL_CALL else NO_HOOKS

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model, grads = args[0], torch.is_grad_enabled()
        if model.training != grads:
            return
        name = class_name(model)
        anew = self._anew.get(name) if grads else None
        follows = grads and (not anew.over if anew is not None else len(self._anew) < _MODELS)
        if not follows and (self._left <= 0 or (grads and self._knows_enough())):
            return
        if next(plainly.parameters(model), None) is None:
            return
        if follows and anew is None:
            anew = self._anew[name] = Anew()
        samples = _samples([*args[1:], *(kwargs or {}).values()])
        if grads:
            if len(self._trained) < _SAMPLES:
                self._stale = self._stale + len(samples) if samples <= self._trained else 0
                self._trained.update(samples)
            if anew is not None and follows and len(samples) >= _LEAST:
                self._again(name, anew.meets(samples))
            return
        if len(samples) < _LEAST or not self._trained:
            return
        self._left -= 1
        share = len(samples & self._trained) / len(samples)
        if (len(self._trained) >= _SAMPLES or self._passed) and share == 0:
            return  # not all that was trained on is remembered
        if share in (0, 1):
            has, lacks = (NOT_TRAINED, "") if share == 0 else ("", NOT_TRAINED)
            seen = "" if share == 0 else f"all {len(samples)} samples of the batch were trained on"
            self.sink.number(name, share, kind=Value.MANNER, facts={"mode": "unseen", "has": has, "lacks": lacks, "seen": seen})

    def _knows_enough(self) -> bool:
        """Whether a batch of the training need not be read."""
        if len(self._trained) >= _SAMPLES:
            return True
        if self._stale < max(_OFTEN, 2 * len(self._trained)):
            self._gap = self._ahead = 0
            return False
        if self._ahead == 0 < self._gap:
            self._gap = self._ahead = min(2 * self._gap, _SELDOM[1])
            return False
        if self._gap == 0:
            self._gap = self._ahead = _SELDOM[0]
        self._ahead -= 1
        self._passed += 1
        return True

    def _again(self, model: str, new: bool | None) -> None:
        if new is not None:
            facts = {"mode": "holds", "has": ANEW if new else "", "lacks": "" if new else ANEW, "seen": "" if new else "earlier batches come again, with the same samples"}
            self.sink.number(f"{MODEL_CALL} of {model}, batches of the training", 1.0, kind=Value.MANNER, facts=facts)


def _samples(values: Iterable[Any]) -> set[int]:
    """Of the first tensor of several rows, a number for each row."""
    for value in values:
        if type(value) is not torch.Tensor or value.dim() < 2:
            continue
        if not content.plain(value, _LARGEST) or value.is_complex():
            return set()
        rows = value.detach().reshape(value.shape[0], -1)
        if rows.shape[1] < _LEAST:
            return set()
        told = rows[:, :: max(1, rows.shape[1] // _ELEMENTS)][:, :_ELEMENTS]
        told = content.array_of((told.float() if told.dtype is torch.bfloat16 else told).contiguous())
        varied = np.ptp(told, axis=1) != 0 if told.dtype != np.bool_ else np.ones(len(told), dtype=bool)
        return {hash(row.tobytes()) for row in told[varied]}
    return set()
