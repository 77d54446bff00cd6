"""Whether a step that trains a model calls another one of its class, which it does not train: a target network, a teacher, an average, a reference.

Rows of `Value.MANNER`, mode `beside`, of every four of the first steps in which something trained: the class of a model that ran for training `has` another of its class beside it, or `lacks` it in all
four (updates of a policy between those of its critics call no target). A program that calls the model itself in the place of
its target makes as many calls as before, and only which object is called is another. Of the others it says, too, whether all of them train or all evaluate (a teacher that an evaluation
left in its mode), and whether what they are given is another input (a second view) or what the model is given that trains. A call is no training where gradients are off, or where no parameter of what is called takes part.

Cost: some microseconds a call of a model, of 64 steps; what a class is given is read in so many of its calls (a solver calls its function thousands of times a step)
that more say nothing of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes.judged import readable
from proctor.invariants.schema import MODEL_CALL, Value

ANOTHER: Final = "another of its class, which it does not train"
_MODES: Final = {True: "another of its class, in training mode", False: "another of its class, in evaluation mode"}
_INPUTS: Final = {True: "another of its class, on what it is given itself", False: "another of its class, on another input"}
_ELEMENTS: Final = 4096  # of an input
_READ: Final = 64  # calls of a class, of four steps, whose inputs are read
_STEPS: Final = 64
_TOGETHER: Final = 4
_CLASSES: Final = 16


class _Calls:
    """What was called of one class: ids of models, their modes, and what they were given."""

    def __init__(self) -> None:
        self.models: set[int] = set()
        self.modes: set[bool] = set()
        self.inputs: set[int] = set()
        self.read = 0  # calls whose inputs these are; more than _READ: not of all

    @property
    def whole(self) -> bool:
        return bool(self.inputs) and self.read <= _READ


@register
class Beside(Probe):
    """Models that run beside one of their class."""

    name = "beside"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._left = _STEPS
        self._trained: dict[str, _Calls] = {}  # by class
        self._other: dict[str, _Calls] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._called, None) if function == MODEL_CALL else NO_HOOKS

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._left <= 0:
            return
        import torch

        model = args[0]
        first = next(plainly.parameters(model), None)
        if first is None:  # a loss, an augmentation
            return
        trains = torch.is_grad_enabled() and (first.requires_grad or any(p.requires_grad for p in plainly.parameters(model)))
        into, name = self._trained if trains else self._other, class_name(model)
        if len(into) < _CLASSES or name in into:
            calls = into.setdefault(name, _Calls())
            calls.models.add(id(model))
            calls.modes.add(bool(model.training))
            calls.read += 1
            if calls.read <= _READ:
                calls.inputs |= _inputs(args[1:])

    def step_begins(self, step: int) -> None:
        self.over = self._left <= 0
        if self.over or not self.sink.live or not self._trained:
            return
        self._left -= 1
        if self._left % _TOGETHER:
            return
        trained, other = self._trained, self._other
        self._trained, self._other = {}, {}
        for name, mine in sorted(trained.items()):
            beside, short = other.get(name, _Calls()), name.rpartition(".")[2]
            if not beside.models - mine.models:
                self._say(name, "", ANOTHER, f"only the {short} that trains was called")
                continue
            self._say(name, ANOTHER, "", "")
            if beside.models & mine.models:
                continue  # the model that trains is evaluated, too, and its calls are not told apart
            if len(beside.modes) == 1:
                mode = next(iter(beside.modes))
                self._say(name, _MODES[mode], _MODES[not mode], f"each {short} that was called beside it was in {'training' if mode else 'evaluation'} mode")
            common = bool(beside.inputs & mine.inputs)
            if beside.whole and mine.whole and (not common or beside.inputs <= mine.inputs):
                seen = f"each {short} that was called beside it was given {'what it was given itself' if common else 'another input'}"
                self._say(name, _INPUTS[common], _INPUTS[not common], seen)

    def thinned(self) -> None:
        self._left = 0  # of a step that is left out nobody knows what was called

    def _say(self, name: str, has: str, lacks: str, seen: str) -> None:
        self.sink.number(name, float(bool(has)), kind=Value.MANNER, call=0, facts={"mode": "beside", "has": has, "lacks": lacks, "seen": seen})


def _inputs(values: Iterable[Any]) -> set[int]:
    """Fingerprints of the tensors on the CPU that a model is given, of their first elements."""
    from proctor.instrument.observe.fingerprint import fingerprint_all

    found = [value.detach().reshape(-1)[:_ELEMENTS] for value in values if readable(value) and value.is_contiguous() and value.numel() > 1]
    return {summary.fp for summary in fingerprint_all(found)} if found else set()
