"""Whether a rate that the program changes while it trains gets to its optimizer.

A row of `Value.KEPT`, `rate`, once for an optimizer: it was made with `lr=NAME`, the function that made it gives NAME another number in a loop, NAME has had one for 32 updates of this optimizer by now, and no optimizer has that rate: the
rate that the program thinks it has, and writes to its log, is not the one that it trains with. An optimizer that is made anew, groups that are given the rate, and schedulers are none: then the rate is the number, or was changed. Only a number that was the rate at the
first update is followed. Cost: where there is such a function (its source is read once for an optimizer), a walk up the frames at each eighth update; else nothing behind the first steps.
"""

from __future__ import annotations

import ast
import math
import sys
import types
import weakref
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._askers import Askers
from proctor.instrument.probes.source import reading
from proctor.instrument.probes.source.parsing import dotted, function_tree, module_tree, statements, written
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_MADE: Final = "torch.optim.Optimizer.__init__"
_EACH: Final = 8  # updates
_LOOKS: Final = 4  # in a row that show one number which is not the rate
_OPTIMIZERS: Final = 16
_FRAMES: Final = 60
_LATEST: Final = 8  # step; who makes no such optimizer before makes none


class _Followed:
    """An optimizer and the variable that its rate came from."""

    def __init__(self, optimizer: Any, code: types.CodeType, name: str, rate: float) -> None:
        self.ref, self.code, self.name, self.rate = weakref.ref(optimizer), code, name, rate
        self.updates = self.times = 0
        self.now = rate


@register
class Rates(Probe):
    """Variables that rates came from."""

    name = "rates"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._askers = Askers()
        self._all: list[weakref.ref[Any]] = []  # optimizers
        self._followed: dict[int, _Followed] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return {_MADE: (None, self._made), _UPDATE: (self._updates, None)}.get(function, NO_HOOKS)

    def step_begins(self, step: int) -> None:
        self.over = self.over or (step >= _LATEST and not self._followed)

    def thinned(self) -> None:
        """Fewer updates are counted; the number is looked at when one is."""

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if raised or len(self._all) >= _OPTIMIZERS:
            return
        self._all.append(weakref.ref(args[0]))
        frame = self._askers.of(sys._getframe())
        name = _variable(frame) if frame is not None else ""
        rate = _rate(args[0])
        if frame is not None and name and rate is not None:
            self._followed[id(args[0])] = _Followed(args[0], frame.f_code, name, rate)

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known = self._followed.get(id(args[0])) if self._followed else None
        if known is None or known.ref() is not args[0]:
            return
        known.updates += 1
        if known.updates % _EACH != 1:
            return
        number = _number(known.name, known.code)
        if number is None or _rate(args[0]) != known.rate or (known.updates == 1 and number != known.rate):
            del self._followed[id(args[0])]
            return
        theirs = [rate for ref in self._all if (other := ref()) is not None and (rate := _rate(other)) is not None]
        other = number > 0 and not any(math.isclose(number, rate, rel_tol=1e-9) for rate in theirs)
        known.times = (known.times + 1 if number == known.now else 1) if other else 0
        known.now = number
        if known.times > _LOOKS:
            kind = type(args[0]).__name__
            seen = f"{known.name}, of which {kind} was given {known.rate:g} as its rate, has been {number:g} for {_EACH * _LOOKS} updates, and {kind} still trains with {known.rate:g}: nobody gave it the new one"
            self.sink.number(known.name, number, kind=Value.KEPT, facts={"what": "rate", "seen": seen})
            del self._followed[id(args[0])]


def _rate(optimizer: Any) -> float | None:
    """The rate of all groups; None where they differ, or have none that is a plain number."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return float(rates[0]) if rates and all(type(rate) in (int, float) and rate == rates[0] for rate in rates) else None


def _variable(frame: types.FrameType) -> str:
    """The variable that the call which runs in this frame is given as `lr`, if the function gives it a number in a loop, too."""
    code = frame.f_code
    if reading.asks(code):
        return ""
    lines = list(code.co_positions())[frame.f_lasti // 2]
    tree = module_tree(code) if code.co_name == "<module>" else function_tree(code)
    if tree is None or lines[0] is None:
        return ""
    call = next((n for n in ast.walk(tree) if isinstance(n, ast.Call) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == lines), None)
    given = next((k.value for k in call.keywords if k.arg == "lr"), None) if call is not None else None
    name = dotted(given) if isinstance(given, ast.Name | ast.Attribute) else ""
    again = any(loops and name in written(node) for node, loops, _ in statements(tree.body, (), ()) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign))
    return name if name and again else ""


def _number(name: str, code: types.CodeType) -> float | None:
    """What a variable holds in the innermost run of a function."""
    frame: types.FrameType | None = sys._getframe()
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code is code:
            scope = reading.scope_of(frame)
            try:
                return reading.read(name, scope.get)
            finally:
                reading.release(frame, scope)
        frame = frame.f_back
    return None
