"""Step, microbatch and phase of the training loop, found from what the program does.

A *step* is one optimizer update of the outermost loop, with the forwards and backwards that it uses before it and whatever follows it
after it. It begins with the first training forward or backward after the last update, or with an update that none came before. So
what follows an update (clearing gradients, copying masters back, EMA, a scheduler, an evaluation, saving) belongs to the step that it
finishes, and a loop that ends with `step(); zero_grad()` has no step more than updates.

* `zero_grad` begins nothing: it clears the gradients of the step that it follows. Where it throws away gradients that no update used,
  it ends their step. So does a loss scaler that skips an update.
* An update of an optimizer that is at rest (no training since it was made or since its last update) and that can move nothing
  (no gradient, or a learning rate of 0) is none: checkpoint libraries do one to have state to load into, programs to move a schedule on.
* With several optimizers (GAN, actor-critic) a step is a round, in which each updates once at most. When all have, it is over. When
  some have not, `_rounds.py` tells whether what comes now is of this round. Optimizers of the same parameters (one that wraps another,
  one for each task) are one.
* Where a process has no optimizer of torch, an update is that parameters changed since the backward before (`steps.by_hand`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

from proctor.instrument.record.rows import take
from proctor.instrument.steps.rounds import Rounds


class StepClock:
    """Counts steps and microbatches from training acts. Pure: knows no torch. Optimizers go by a number."""

    def __init__(self) -> None:
        self.step = -1
        self.micro = 0
        self.phase = "init"
        self._rounds = Rounds()
        self._acts = 0  # training forwards and backwards so far
        self._acts_at: dict[int, int] = {}  # by optimizer: how many there were at its last update, or when it was made
        self._dropped = False  # gradients of this step were cleared before an update used them
        self.backward_pending = False  # a backward that no update followed yet; read by `steps.py`
        self._backward_in_micro = False
        self._cleared: set[int] = set()  # optimizers whose gradients were cleared since the last backward
        self._probing = False  # what this microbatch computes is not, or not only, for an update
        self.on_new_step: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None

    def optimizer_created(self, key: int) -> None:
        self._rounds.joins(key, anew=self.step >= 0 and not self.backward_pending)
        self._acts_at[key] = self._acts

    def fetched(self) -> None:
        """The program has taken a batch from a loader."""
        self._rounds.fetched()

    def zero_grad(self, key: int | None, moved: Callable[[], bool] = lambda: False) -> None:
        """Gradients are cleared.

        Args:
            key: the optimizer, None for `Module.zero_grad`.
            moved: whether parameters changed since the backward that nothing updated with. Asked where it matters.
        """
        if self.step < 0:
            return
        if key is not None:
            self._cleared.add(key)
            self._rounds.cleared(key)
        if self.backward_pending and not self._rounds.ended and not self._probing:
            members = self._rounds.members
            thrown_away = members <= self._cleared or (key is None and len(members) < 2)
            self._dropped |= thrown_away and not moved()
        self._set("train")

    def forward(self, training: bool, probing: bool = False) -> None:
        """A call of an outermost module.

        Args:
            training: it may be followed by a backward.
            probing: if it is the first of a microbatch, its backward is for what it is given: an attack on an input.
        """
        if not training:
            if self.step >= 0:
                self._set("eval")
            return
        self._acts += 1
        if self._done():
            self._begin()
            self._probing = probing
        elif self._backward_in_micro:
            self.micro += 1
            self._backward_in_micro = False
            self._probing = probing
            self._changed()
        self._set("train")

    def backward(self) -> None:
        self._acts += 1
        if self._done():
            self._begin()
        self._cleared.clear()
        self.backward_pending = True
        self._backward_in_micro = True
        self._set("train")

    def at_rest(self, key: int) -> bool:
        """Whether nothing was trained since this optimizer was made, or since its last update."""
        return self._acts == self._acts_at.get(key, -1)

    def update_begins(self, key: int) -> None:
        if self.step < 0 or self._rounds.over or self._rounds.repeats(key):
            self._begin()
        self._set("train")

    def update_ends(self, key: int, inner: tuple[int, ...] = ()) -> None:
        """An update is done, or a loss scaler skipped it.

        Args:
            key: the optimizer.
            inner: those that it has called to do so.
        """
        self._rounds.updated(key, inner)
        self._acts_at[key] = self._acts
        self._dropped = False
        self.backward_pending = False
        self._backward_in_micro = False

    def state(self) -> Hashable:
        """All that what it does with later acts follows from, but for numbers that only grow (`steps/cycles.py`)."""
        members = self._rounds.members
        return (
            self.micro, self.phase, self._dropped, self.backward_pending, self._backward_in_micro, self._probing, frozenset(self._cleared),
            tuple((key, self._acts - at) for key, at in self._acts_at.items() if key in members), self._rounds.state(),
        )  # fmt: skip

    def pass_by(self, times: int, steps: int, acts: int, keys: tuple[int, ...]) -> None:
        """A cycle of updates behind which the `state` is as before went by so many times.

        Args:
            times: how many.
            steps: that began in all of them together.
            acts: training forwards and backwards in each.
            keys: whose updates there are in each, in their order.
        """
        self.step += steps
        self._acts += times * acts
        for key in set(keys):
            self._acts_at[key] += times * acts
        self._rounds.pass_by(times, keys)

    def checkpoint(self, entering: bool, before: str = "init") -> str:
        """Enter or leave a checkpoint operation; returns the phase to restore."""
        previous = self.phase
        self._set("checkpoint" if entering else before)
        return previous

    def _done(self) -> bool:
        """Whether a forward or backward now is of the next step."""
        return self.step < 0 or self._dropped or self._rounds.done()

    def _begin(self) -> None:
        if self.on_new_step is not None and self.step >= 0:
            self.on_new_step()
        self.step += 1
        self.micro = 0
        self._rounds.begin()
        self._dropped = False
        self.backward_pending = False
        self._backward_in_micro = False
        self._cleared.clear()
        self._probing = False
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
        self._asked: tuple[int, int, str, int] = (-1, 0, "", 0)  # step, micro, phase and recompute at the last question `present` …
        self._answers: dict[bool, int] = {}  # … and its answers, by grad mode

    def present(self, grad: bool) -> int:
        """Code of the present context without autocast; asked several times between two changes of it."""
        clock = self.clock
        if self.meta:
            return self.resolve(self.base(), grad, "", "")
        asked = clock.step, clock.micro, clock.phase, self.recompute
        if asked != self._asked:
            self._asked, self._answers = asked, {}
        code = self._answers.get(grad)
        if code is None:
            code = self._answers[grad] = self.resolve(self.base(), grad, "", "")
        return code

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
