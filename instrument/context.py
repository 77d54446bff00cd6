"""Step, microbatch and phase of the training loop, found from what the program does.

A *step* is one optimizer update of the outermost loop. It begins with the first training act after the last update:
`zero_grad`, a training forward, a backward, or an update. So what follows an update (copying masters back, EMA,
a scheduler, an evaluation) still belongs to the step that it finishes. With several optimizers (GAN, actor-critic)
a step ends when each of those that take part has updated once. An update that was skipped (overflow) still ends
its step: `zero_grad` after a backward that no update followed begins a new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from proctor.instrument._rows import take


class StepClock:
    """Counts steps and microbatches from training acts. Pure: knows no torch."""

    def __init__(self) -> None:
        self.step = -1
        self.micro = 0
        self.phase = "init"
        self._ended = False  # an update of this step is done
        self._over = False  # this step is done, whoever takes part in the next one
        self._stepped: set[int] = set()  # optimizers that updated in this step
        self._cycle: set[int] = set()  # optimizers that take part in a step
        self._missed: dict[int, int] = {}  # steps in which one of the cycle did not update
        self._backward_pending = False  # a backward that no update followed yet
        self._backward_in_micro = False
        self.on_new_step: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None

    def optimizer_created(self, key: int) -> None:
        if self.step >= 0 and not self._backward_pending and (not self._ended or self._complete()):
            self._over = self._ended  # a new phase: earlier optimizers may be done with
            self._cycle.clear()
            self._missed.clear()
        self._cycle.add(key)

    def zero_grad(self, key: int | None) -> None:
        """`key` is the optimizer, or None for `Module.zero_grad`."""
        skipped = self._backward_pending and not self._stepped
        again = key is not None and key in self._stepped
        if self.step < 0 or skipped or again or self._done():
            self._begin()
        self._set("train")

    def forward(self, training: bool) -> None:
        """An outermost module call; `training`: it may be followed by a backward."""
        if not training:
            if self.step >= 0:
                self._set("eval")
            return
        if self.step < 0 or self._done():
            self._begin()
        elif self._backward_in_micro:
            self.micro += 1
            self._backward_in_micro = False
            self._changed()
        self._set("train")

    def backward(self) -> None:
        if self.step < 0 or self._done():
            self._begin()
        self._backward_pending = True
        self._backward_in_micro = True
        self._set("train")

    def update_begins(self, key: int) -> None:
        if self.step < 0 or self._over or key in self._stepped:
            self._begin()
        self._cycle.add(key)
        self._set("train")

    def update_ends(self, key: int) -> None:
        self._stepped.add(key)
        self._missed.pop(key, None)
        self._ended = True
        self._backward_pending = False
        self._backward_in_micro = False

    def checkpoint(self, entering: bool, before: str = "init") -> str:
        """Enter or leave a checkpoint operation; returns the phase to restore."""
        previous = self.phase
        self._set("checkpoint" if entering else before)
        return previous

    def _done(self) -> bool:
        return self._over or (self._ended and self._complete())

    def _complete(self) -> bool:
        return self._cycle <= self._stepped

    def _begin(self) -> None:
        for key in self._cycle - self._stepped:
            self._missed[key] = self._missed.get(key, 0) + 1
            if self.step >= 0 and self._missed[key] >= 2:
                self._cycle.discard(key)  # constructed, or used earlier, but not part of this loop
        if self.on_new_step is not None and self.step >= 0:
            self.on_new_step()
        self.step += 1
        self.micro = 0
        self._stepped.clear()
        self._over = self._ended = False
        self._backward_pending = False
        self._backward_in_micro = False
        self._changed()

    def _set(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


KEPT_BASES = 1024  # base contexts in memory; at most a few a step are in use


class ContextTable:
    """Interns contexts: the base (step, micro, phase, recompute, meta) and, per call, grad mode and autocast."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.meta: dict[str, Any] = {}
        self.recompute = 0
        # Only recent ones are kept: a run of a million steps has millions.
        self._bases: dict[int, tuple[int, int, str, bool, str]] = {0: (-1, 0, "init", False, "{}")}
        self._base_index: dict[tuple[int, int, str, bool, str], int] = {self._bases[0]: 0}
        self._index: dict[tuple[int, bool, str, str], int] = {}
        self._next_base, self._next = 1, 1
        self.rows: list[tuple[Any, ...]] = []  # pending rows of the context table

    def base(self) -> int:
        """Code of the present base context."""
        key = (
            self.clock.step,
            self.clock.micro,
            self.clock.phase,
            self.recompute > 0,
            json.dumps(self.meta, sort_keys=True, default=str) if self.meta else "{}",
        )
        code = self._base_index.get(key)
        if code is None:
            code = self._base_index[key] = self._next_base
            self._bases[code] = key
            self._next_base += 1
            if len(self._bases) > KEPT_BASES:
                oldest = code - KEPT_BASES // 4
                self._bases = {c: k for c, k in self._bases.items() if c >= oldest}
                self._base_index = {k: c for c, k in self._bases.items()}
                self._index = {k: v for k, v in self._index.items() if k[0] >= oldest}
        return code

    def resolve(self, base: int, grad: bool, autocast: str, outer: str) -> int:
        """Code of a full context; called by the tap once per new combination."""
        key = (base, grad, autocast, outer)
        code = self._index.get(key)
        if code is None:
            code = self._index[key] = self._next
            self._next += 1
            step, micro, phase, recompute, meta = self._bases.get(base) or self._bases[max(self._bases)]
            self.rows.append((code, step, micro, phase, grad, autocast, outer, recompute, meta))
        return code

    def take_rows(self) -> list[tuple[Any, ...]]:
        return take(self.rows)
