"""Which functions of the program are called again and again, though not in each step.

Rows of `Value.MANNER`, mode `often`, when so many steps are over: one for each function that several of them called, at its first call, and one more that names all functions that were
called at all (`begun`), by which one that was never called is known. Such are an average that moves with each second update, a second optimizer's part, a look at gradients. What is drawn by
chance now and then is not called in six steps of 32 in one run and in none of another. Cost: a look into a table at each call of the program's functions, for 128 steps.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

MARKS: Final = (32, 128)  # steps
LEAST: Final = 6  # of them, that call a function
_MOST: Final = 512  # functions


@register
class Often(Probe):
    """Functions that come again."""

    name = "often"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._over = False
        self._step = -1
        self._first: dict[str, int] = {}  # the first call in a step of training
        self._last: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._early: set[str] = set()  # called before any step

    def hooks(self, function: str, home: Home) -> Hooks:
        if home is not Home.USER or function.rpartition(".")[2] == "__init__":
            return NO_HOOKS

        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            step = self._step
            if self._over or self._last.get(function) == step:
                return
            if step < 0:
                self._early.add(function)
                return
            if len(self._first) >= _MOST and function not in self._first:
                self._over = True  # not all of them can be named
                return
            self._first.setdefault(function, self.sink.call)
            self._last[function] = step
            self._steps[function] = self._steps.get(function, 0) + 1

        return before, None

    def thinned(self) -> None:
        self._over = True

    def step_begins(self, step: int) -> None:
        if step in MARKS and not self._over and self._step == step - 1:
            for function, steps in sorted(self._steps.items()):
                if LEAST <= steps <= step - LEAST:  # what each step calls is told without
                    self._say(function, step, self._first[function], "")
            self._say("", step, None, "|".join(sorted({*self._first, *self._early})))
        self._over = self._over or step >= MARKS[-1]
        self._step = step

    def _say(self, function: str, step: int, call: int | None, begun: str) -> None:
        self.sink.number(function, float(step), kind=Value.MANNER, facts={"mode": "often", "has": f"in the first {step} steps", "lacks": "", "begun": begun}, call=call)
