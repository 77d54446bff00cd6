"""How copies of a model move: averages of its weights, target networks, teachers.

Rows of `Value.AVERAGE`, three for each copy at the end of a step, of some elements of some of its tensors. The place is the
copy; meta `side` says what is measured:

* `now`: `number` is the rate at which the copy moved towards the model as it is at the end of the step, by least squares, and
  `norm` the largest deviation of an element from that, in units of rounding;
* `old`: the same towards the model as it was before the step;
* `move`: `number` is the largest move of an element of the copy, `norm` its largest distance from the model, in these units.

A fourth row, `begin`, comes with the first moves of a copy as an average that remembers its beginning: `number` is how many of the tensors that are looked at, of `norm`, were
then farther from the model's than training can have brought them, and in another direction. It began as something else. And one, `keeps`, with each move of more than nine tenths of the way, and not
all of it, that two such came before: `number` is the rate, `norm` how many there were, whatever lay between them.

Rows of `Value.KEPT` say of a copy that is a module whether its buffers follow (`_statistics.py`): `statistics` when it is evaluated, `buffers` at the end of a step; and
`rests`, when it is evaluated again, whether it has moved since (`_resting.py`). `alike`: copies of several models are used in one way (`_siblings.py`).

Cost: 10 µs a copy and tensor of a step; one look for copies, as long as a garbage collection, at two steps of a run.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from proctor.instrument.observe import plainly
from proctor.instrument.probes import (
    NO_HOOKS,
    Home,
    Hooks,
    Probe,
    Sink,
    _copies,
    _resting,
    _siblings,
    _statistics,
    register,
)
from proctor.instrument.probes._held import Optimizers
from proctor.invariants.schema import MODEL_CALL, Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_LOOKS: Final = frozenset({1, 8})  # steps before which copies are looked for
_ELEMENTS: Final = 6  # of a tensor
_MODELS: Final = 4
_OPTIMIZERS: Final = 4096  # some libraries make one for each parameter
_EPSILON: Final = 2.0**-23  # of float32; copies in other precisions deviate more
_TINY: Final = 2.0**-100
_ROWS: Final = 64  # of what the buffers of one copy do
_BEGINNINGS: Final = 3  # moves: one shows no manner
_SLOW: Final = 0.15  # of the way to the model; faster ones forget where they began, as a mean that starts with another model's weights
_EXACT: Final = 16.0  # units of rounding that it may deviate by
_FAR: Final = 0.5  # of the length of the model's tensor,
_TIMES: Final = 2.0  # and in moves of the model, one a step,
_MOST: Final = 0.9  # of the way to the model, of which an average keeps more,
_SEVERAL: Final = 3  # moves in a row
_TOLD: Final = 256.0  # units below which a move is too small to tell a rate from
_ALONG: Final = 0.7  # and cosine: a mean that grows from zero has the direction of the model


class _Known:
    """A copy, and what it and its model held at the last end of a step."""

    def __init__(self, copy: _copies.Copy, number: int) -> None:
        self.copy, self.place = copy, f"{copy.label} #{number}"
        self.step = -2
        self.values: list[float] = []
        self.model: list[float] = []
        self.begun = 0  # rows that say how it began
        self.forgot = 0  # moves in a row that went most of the way
        modules = [ref() for ref in copy.modules or ()]
        whole = bool(modules) and None not in modules
        self.statistics = _statistics.Statistics(*modules) if whole else None
        self.roots = _copies.Roots(*modules) if whole else None
        self.resting = _resting.Resting(copy)
        self.rows = 0  # of what its buffers and evaluations do
        self.use = _siblings.Use(copy)


@register
class Averages(Probe):
    """Moves of copies."""

    name = "averages"
    kinds = frozenset({Value.AVERAGE, Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._models: list[weakref.ref[Any]] = []
        self._optimizers = Optimizers(_OPTIMIZERS)
        self._known: list[_Known] = []
        self._asked = False  # whether copies beside each other were compared
        self._before: _siblings.Use | None = None  # of the copy that was called last, if no other model was since

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        return (self._updates, None) if function == _UPDATE else NO_HOOKS

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        module, before, self._before = args[0], self._before, None
        for known in self._known:
            if known.roots is not None and not self._asked and known.roots.of(module)[0]:
                known.use.called(before)
                self._before = known.use
            if known.roots is not None and known.statistics is not None and known.rows < _ROWS:
                self._evaluated(known, known.statistics, known.roots.of(module), module, [*args[1:], *(kwargs or {}).values()])
        if len(self._models) >= _MODELS:
            return
        for ref in self._models:
            if ref() is module:
                return
        if _learns(module):
            self._models.append(weakref.ref(module))

    def _evaluated(self, known: _Known, statistics: _statistics.Statistics, inside: tuple[bool, ...], root: Any, values: list[Any]) -> None:
        copy, model = inside
        if copy:
            self._tell(known, "statistics", statistics.called())
        if model and root.training and torch.is_grad_enabled():
            self._tell(known, "rests", known.resting.trains())
        elif model:
            known.resting.looks()
        elif copy and not root.training and not torch.is_grad_enabled():
            known.resting.called(values)

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._optimizers.know(args[0])

    def step_begins(self, step: int) -> None:
        if not self.sink.live:
            return
        if step in _LOOKS:
            self._look()
        if not self._known:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._known = [known for known in self._known if self._measure(known, step)]
        if step >= _siblings.AT and not self._asked:
            self._asked = True
            for name, seen in _siblings.odd([known.use for known in self._known]):
                self.sink.number(name, 1.0, kind=Value.KEPT, call=0, facts={"what": "alike", "seen": seen})

    def _look(self) -> None:
        held = {id(p) for o in self._optimizers.living() for group in o.param_groups for p in group["params"] if p.requires_grad}
        mine = {id(ref()) for known in self._known for ref, _ in known.copy.pairs}
        models = [m for ref in self._models if (m := ref()) is not None and any(id(p) in held for p in plainly.parameters(m))]
        objects = gc.get_objects() if models else []
        for model in models:
            for copy in _copies.find(model, held, objects):
                if len(self._known) < _copies.MAX_COPIES and not any(id(ref()) in mine for ref, _ in copy.pairs):
                    self._known.append(_Known(copy, len(self._known)))
                    mine.update(id(ref()) for ref, _ in copy.pairs)

    def _measure(self, known: _Known, step: int) -> bool:
        """Append the rows of one copy; false once it is gone."""
        now = _copies.values(iter(c for c, _ in known.copy.pairs), _ELEMENTS)
        model = _copies.values(iter(p for _, p in known.copy.pairs), _ELEMENTS)
        if now is None or model is None:
            return False
        known.use.begins(step, now, model)
        if known.step == step - 1 and len(now) == len(known.values):
            scale = [_EPSILON * max(abs(a), abs(b), abs(c), _TINY) for a, b, c in zip(now, known.values, model)]
            moved = [a - b for a, b in zip(now, known.values)]
            fits = {"now": _fit(moved, known.values, model, scale), "old": _fit(moved, known.values, known.model, scale)}
            for side, (rate, off) in fits.items():
                self._put(known, side, rate, off)
            if known.begun < _BEGINNINGS and any(0 < rate < _SLOW and off <= _EXACT for rate, off in fits.values()):
                self._begins(known, model, step)
            farthest = max(abs(m - a) / s for m, a, s in zip(model, now, scale))
            self._put(known, "move", most := max(abs(m) / s for m, s in zip(moved, scale)), farthest)
            rate, off = fits["now"]
            if most >= _TOLD:
                known.forgot = known.forgot + 1 if _MOST < rate < 1 + 1e-3 and off <= _EXACT and farthest >= 4 * _EXACT else 0
                if known.forgot >= _SEVERAL:
                    self._put(known, "keeps", rate, known.forgot)
            known.use.steps(step, moved=most > 0, learned=model != known.model, rate=fits["now"][0])
            if known.statistics is not None and known.rows < _ROWS:
                self._tell(known, "buffers", known.statistics.step(moved=most > 0))
        known.step, known.values, known.model = step, now, model
        return True

    def _begins(self, known: _Known, model: list[float], step: int) -> None:
        """The copy has moved as an average."""
        sizes = [min(_ELEMENTS, p.numel()) for _, ref in known.copy.pairs if (p := ref()) is not None]
        far = told = begin = 0
        for size in sizes:
            was, then, now = (side[begin : begin + size] for side in (known.values, known.model, model))
            begin += size
            away, moved = math.dist(was, then), math.dist(then, now)
            if not moved:
                continue  # it rests, and says nothing of how fast it moves
            told += 1
            length = math.hypot(*then)
            along = sum(a * b for a, b in zip(was, then)) / (length * math.hypot(*was) or 1.0)
            far += away > _FAR * length and away > _TIMES * (step + 1) * moved and along < _ALONG
        if told:
            known.begun += 1
            self._put(known, "begin", far, told)

    def _tell(self, known: _Known, what: str, found: bool | str | None) -> None:
        if found is None:
            return
        known.rows += 1
        seen = "" if found is True else f"{found} ({known.copy.label.removeprefix('module ')})"
        place = known.place if found is True or what == "rests" else str(found).partition(" ")[0]
        self.sink.number(place, 1.0, kind=Value.KEPT, call=0 if what == "buffers" else None, facts={"what": what, "seen": seen})

    def _put(self, known: _Known, side: str, number: float, norm: float) -> None:
        self.sink.measured(Value.AVERAGE, known.place, {"side": side}, (0, norm, 0), number, item=-1, call=0)


def _learns(module: Any) -> bool:
    """Whether this is a model that trains; augmentations and losses are modules, too, and are called by themselves."""
    return bool(module.training) and any(p.requires_grad for p in plainly.parameters(module))


def _fit(moved: Sequence[float], before: Sequence[float], model: Sequence[float], scale: Sequence[float]) -> tuple[float, float]:
    """Rate of a move towards a model, and its largest deviation from a move at that rate."""
    way = [m - b for m, b in zip(model, before)]
    weight = [1 / (s * s) for s in scale]
    length = sum(w * d * d for w, d in zip(weight, way))
    rate = sum(w * m * d for w, m, d in zip(weight, moved, way)) / length if length else 0.0
    return rate, max(abs(m - rate * d) / s for m, d, s in zip(moved, way, scale))
