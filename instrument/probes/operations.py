"""Which operations of torch the program's own functions use, and in which order.

Rows of `Value.MANNER`, mode `uses`: of a few early calls of each function of the program, and of each model that trains, what each of the program's
functions on the stack used, in the order of the first use. `has` holds names of operations (`softmax`, `detach`), with `()` of functions
of the program that it called, updates, and models with the mode that they were called in; what stands at several places of the function is there several times (`mul`,
`mul (place 2)`), which no number of rounds of a loop changes. What layers and functions of torch do belongs to the function of the program that called them; what other libraries do, and what
torch's optimizers and helpers compute, is their own affair. Of methods of a module `self` holds its mode, where it was one all along:
both modes have looks of their own. Of a few whole steps, likewise, what the functions used that a step begins and ends in (a training loop, or a script without
functions) and autograd functions of the program in their forward, and of such steps again where an optimizer steps for the first time when these are over: a second stage. Looked at in this way are
calls and steps that a function mode of torch is on for; the mode hands each operation on as it is.

A mode changes two things in torch, and both are kept from happening: attention's inference kernels are not taken while one is on (so it is off while a model
that has them evaluates), and what `torch.compile` made would be compiled again (so nothing is looked at in a process that compiles). The first call of a function is not
looked at: it may take long. Of one that contained several updates (an epoch, an update of PPO) calls are looked at up to their first update. Cost: 3 to 10 µs an operation of the calls that are looked at.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.patch.compiled import anything_compiled
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._looks import OPENING, STEP, Look
from proctor.invariants.schema import MODEL_CALL, Value

LAST_STEP: Final = 64
STEPS: Final = (6, 9, 14, 22, 35, 57)  # looked at as a whole; not one behind the other, so that an end of an epoch is seldom in several
_UPDATE: Final = "torch.optim.Optimizer.step"
_LOOKS: Final = 6  # of a function
_PHASES: Final = 3  # behind the first: from a new optimizer's first step on, where that is late
_SELDOM: Final = 8  # calls; a function that had fewer by the last step is looked at later, too
_UPDATES: Final = 2  # in a call; one with more is not a part of a step


@register
class Operations(Probe):
    """What functions of the program use."""

    name = "operations"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._over = False  # nothing is looked at any more
        self._late = False
        self._step = 0  # the call of the last update
        self._now = self._since = 0  # the present step, and the one that this phase of the program began behind
        self._phases = 0
        self._calls: dict[tuple[str, str], list[int]] = {}  # of each function and mode of its module: calls, looks, and whether one had several updates
        self._updates = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # in the order of their first steps
        self._updated_last: Callable[[], Any] = lambda: None  # the optimizer that stepped last
        self._running: list[tuple[int, tuple[str, str], int]] = []  # call, function and updates before it, of each first call that runs
        self._look: Look | None = None
        self._attentive: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}  # by id of a model called in this step: its layers that have such kernels
        self._kept_off: list[int] = []  # calls of models whose kernels a mode would change
        self._stuck: Look | None = None  # whose mode could not be taken off
        self._thread = threading.get_ident()

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _UPDATE:
            return self._updated, None
        if function == MODEL_CALL:
            return self._model_begins, self._model_ends
        if home is not Home.USER or function.rpartition(".")[2] == "__init__":
            return NO_HOOKS
        return (lambda args, kwargs: self._begins(function, args)), (lambda args, kwargs, result, raised: self._leaves(function, args, raised))

    def step_begins(self, step: int) -> None:
        if threading.get_ident() != self._thread:
            return
        self._now = step
        self._late = step - self._since > LAST_STEP
        self._attentive.clear()
        if self._stuck is not None and self._stuck.ends():
            self._stuck = None
        look = self._look
        if look is not None and look.function == STEP:
            self._drop()
            self._tell(look)
        if step - self._since in STEPS and not (self._look or self._over or self._kept_off or self._stuck or anything_compiled()):
            self._look = Look(STEP, 0, 0)
            self._look.begins()

    def thinned(self) -> None:
        """The call or step that is looked at may end without hooks."""
        self._over = True
        self._drop()

    def _drop(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            self._stuck = None if look.ends() else look

    def _updated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._look is not None and self._look.opening and threading.get_ident() == self._thread:
            look = self._look
            look.running = look.on_the_stack()
            self._drop()
            self._tell(look)
        self._updates += 1
        self._step = self.sink.call
        if self._look is None and args[0] is self._updated_last():
            return
        if args[0] not in self._optimizers and self._now - self._since > STEPS[-1] and self._phases < _PHASES:
            self._since, self._phases = self._now, self._phases + 1  # a second stage has a loop of its own
        self._updated_last = weakref.ref(args[0])
        self._happens(f"step of optimizer {self._optimizers.setdefault(args[0], len(self._optimizers) + 1)}")

    def _happens(self, what: str) -> None:
        """Something that is no operation, in the call or step that is looked at."""
        if self._look is not None and threading.get_ident() == self._thread:
            self._look.happens(what)

    def _model_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._look is None and self._late:
            if self._over or threading.get_ident() != self._thread:
                return
            self._kept_off.append(self.sink.call)  # modules are not walked in each step of a long run
            return
        if self._idle():
            return
        model, infers = args[0], True
        try:
            infers = self._infers(model)
        finally:
            if infers:
                self._kept_off.append(self.sink.call)
                self._drop()
        if infers:
            return
        if self._look is not None and self._look.guess and not model.training:
            self._drop()  # an evaluation, whose functions are looked at themselves
        if self._look is not None and next(plainly.parameters(model), None) is not None:
            self._happens(_asked(model))
        if model.training:
            self._begins(f"{MODEL_CALL} of {class_name(model)}", ())
        if self._look is not None:
            self._look.enters(_forward(model), _word(model), seen=False)

    def _model_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        kept, call = self._kept_off, self.sink.call
        while kept and kept[-1] >= call:
            kept.pop()
        if self._running or self._look is not None:
            self._ends(raised)

    def _infers(self, model: Any) -> bool:
        """Whether a call of this model may take kernels of attention that torch keeps for inference."""
        known = self._attentive.get(id(model))
        if known is None or known[0]() is not model:
            kinds = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
            known = self._attentive[id(model)] = weakref.ref(model), [m for m in plainly.modules(model) if isinstance(m, kinds)]
        return any(not (m.training and torch.is_grad_enabled()) for m in known[1])

    def _idle(self) -> bool:
        if self._look is not None and not self._look.whole and threading.get_ident() == self._thread:
            self._drop()  # nothing is told of it, and its mode costs what it costs to the end
        return (self._look is None and self._over) or threading.get_ident() != self._thread

    def _leaves(self, function: str, args: tuple[Any, ...], raised: bool) -> None:
        if self._look is not None and threading.get_ident() == self._thread and (mode := _mode_of(function, args)):
            self._look.enters(function, mode)  # it may have changed it
        self._ends(raised)

    def _begins(self, function: str, args: tuple[Any, ...]) -> None:
        if self._stuck is not None and self._thread == threading.get_ident() and self._stuck.ends():
            self._stuck = None
        if self._idle():
            return
        mode = _mode_of(function, args)
        if self._look is not None and mode:
            self._look.enters(function, mode)
        known = self._calls.setdefault((function, mode), [0, 0, 0])
        if self._late and known[0] >= _SELDOM:
            return
        known[0] += 1
        first = known[0] == 1
        if first:
            self._running.append((self.sink.call, (function, mode), self._updates))
        # What is called first when training goes on already may be an epoch, whose first call began before anything was observed.
        if self._look is None and not self._kept_off and known[1] < _LOOKS and (not first or self._updates > _UPDATES) and not anything_compiled():
            known[1] += 1
            self._look = Look(function, self.sink.call, self._updates, opening=first or bool(known[2]))
            self._look.guess = first
            self._look.begins()
            if mode:
                self._look.enters(function, mode)

    def _ends(self, raised: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        call = self.sink.call
        while self._running and self._running[-1][0] >= call:
            _, function, updates = self._running.pop()
            self._calls[function][2] = int(self._updates - updates > _UPDATES)
        look = self._look
        if look is None or look.function == STEP or look.call < call:
            return
        self._drop()
        self._tell(look, whole=look.call == call and not raised and not look.opening and self._updates - look.updates <= _UPDATES)

    def _tell(self, look: Look, *, whole: bool = True) -> None:
        if look.error is not None:
            raise look.error
        step = look.function == STEP
        for function, used in look.told().items() if whole and look.whole else ():
            subject = look.function if function == look.function else f"{look.function} > {function}"
            if look.opening and function in look.running:
                if function != look.function:
                    continue  # it has begun alone
                subject += OPENING
            facts = {"mode": "uses", "has": "|".join(used), "lacks": "", "self": look.mode_of(function), "begun": "|".join(sorted(look.begun.get(function, ())))}
            self.sink.number(subject, float(len(used)), kind=Value.MANNER, facts=facts, call=self._step if step else look.call if look.opening else None)

    def closing(self) -> None:
        self._drop()


def _asked(model: Any) -> str:
    gradients = "" if torch.is_grad_enabled() else " without gradients"
    return f"{type(model).__name__} in {'training' if model.training else 'evaluation'} mode{gradients}"


def _word(module: Any) -> str:
    return "trains" if getattr(module, "training", True) else "evaluates"  # a method may run before its module is made


def _mode_of(function: str, args: tuple[Any, ...]) -> str:
    """The mode of the module whose method is called; "" of other functions."""
    if not args or not isinstance(args[0], torch.nn.Module):
        return ""
    key = function, type(args[0])
    if key not in _METHODS:
        if len(_METHODS) >= 4096:
            _METHODS.clear()
        owner = function.rpartition(".")[0]
        _METHODS[key] = any(owner.endswith(f".{_plain_name(kind)}") for kind in key[1].__mro__)
    return _word(args[0]) if _METHODS[key] else ""


_METHODS: dict[tuple[str, type], bool] = {}  # functions that are methods of a class


def _forward(module: Any) -> str:
    forward = inspect.getattr_static(type(module), "forward", None)  # that of a scripted model raises where its class is asked
    home = str(getattr(forward, "__module__", ""))
    return f"{'__main__' if home == '__mp_main__' else home}.{_plain_name(forward)}"


def _plain_name(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", "")).rpartition("<locals>.")[2]
