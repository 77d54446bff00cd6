"""Probes record values at calls: one file each, found by import, like relations.

A probe says at which functions it wants to look (`hooks`), and appends rows of the `values` table through its `Sink`.
What a probe raises is caught, said once and turns that probe off; the others go on.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, ClassVar, Final

from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.observe.content import no_torch_function
from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.instrument.patch.hooks import as_one
from proctor.instrument.record.rows import take
from proctor.invariants.blindness import VALUES
from proctor.invariants.schema import Name, StateFlag, Value
from proctor.native import Recorder

PRE_ARM_VALUES = 20_000  # rows kept from before the first training act
KEPT_METAS = 4096  # codes of dtype and shape that are remembered
MAX_VALUES = 1_000_000  # rows in memory when the writer cannot keep up

Before = Callable[[tuple[Any, ...], dict[str, Any] | None], None]
After = Callable[[tuple[Any, ...], dict[str, Any] | None, Any, bool], None]
Hooks = tuple[Before | None, After | None]
Gradients = Callable[[Iterable[Any]], list[Any] | None]
NO_HOOKS: Hooks = (None, None)
FIRST_STEPS: Final = 4  # of an `EarlyProbe`


class Home(Enum):
    """Whose function a hook is for."""

    TORCH = "torch"
    LIBRARY = "library"  # transformers, accelerate, …: `instrument/integrations/`
    USER = "user"


class Sink:
    """Where probes put what they saw; rows of the `values` table, in order.

    Args:
        recorder: names and the present call.
        context: code of the present context.
        config: which kinds are wanted.
        live: whether rows are wanted now (a sampled step of a process that is recorded).
        gradients: of parameters, or None where another thread may write them now (`steps/turns.py`). Probes read none themselves.
    """

    def __init__(
        self,
        recorder: Recorder,
        context: Callable[[], int],
        config: RecordConfig,
        live: Callable[[], bool],
        gradients: Gradients | None = None,
    ) -> None:
        self.gradients: Gradients = gradients or (lambda parameters: [p.grad for p in parameters])
        self.recorder, self.config = recorder, config
        self._context, self.wants = context, live
        self.rows: list[tuple[Any, ...]] = []
        self._metas: dict[tuple[Any, ...], int] = {}
        self.dropped = 0
        self.capacity = PRE_ARM_VALUES

    @property
    def live(self) -> bool:
        return self.wants()

    @property
    def call(self) -> int:
        """The call whose hook runs; 0 outside of any."""
        return self.recorder.current_call

    def number(
        self,
        place: str,
        value: float,
        *,
        kind: Value = Value.NUMBER,
        item: int = -1,
        call: int | None = None,
        facts: dict[str, str] | None = None,
    ) -> None:
        """Append a plain number. Integers beyond 2**53 lose their last digits. `facts` is its meta."""
        meta = self.recorder.intern(int(Name.META), json.dumps(facts, sort_keys=True)) if facts else 0
        self._append(kind, place, item, meta, (0, math.nan, 0), float(value), call)

    def note(self, kind: Value, place: str, *, meta: int, call: int | None = None) -> None:
        """Append a row that says something in its meta (a code of `Name.META`) alone."""
        self._append(kind, place, -1, meta, (0, math.nan, 0), math.nan, call)

    def tensors(
        self, kind: Value, seen: Iterable[tuple[str, int, Any]], *, call: int | None = None, numbers: bool = False
    ) -> None:
        """Fingerprint tensors and append a row for each.

        Args:
            seen: place, item and tensor (dense CPU tensors in one native call, one synchronisation a device).
            call: the call they belong to; the present one when left out.
            numbers: also the value of tensors of one element that lie on the CPU.
        """
        seen = list(seen)
        summaries = fingerprint_all([tensor for _, _, tensor in seen]) if seen else []
        for (place, item, tensor), summary in zip(seen, summaries):
            number = math.nan
            if numbers and tensor.numel() == 1 and tensor.device.type == "cpu":
                number = float(tensor.detach())
            self._append(kind, place, item, self._meta(tensor), summary, number, call)

    def summary(self, kind: Value, place: str, tensor: Any, summary: tuple[int, float, int], *, item: int = -1) -> None:
        """Append a row for a tensor that was hashed elsewhere."""
        self._append(kind, place, item, self._meta(tensor), summary, math.nan, None)

    def fingerprint(self, kind: Value, place: str, fp: int, *, item: int = -1, call: int | None = None) -> None:
        """Append a row for content that was hashed elsewhere."""
        self._append(kind, place, item, 0, (fp, math.nan, 0), math.nan, call)

    def description(self, kind: Value, place: str, tensor: Any, *, item: int = -1, call: int | None = None) -> None:
        """Append what a tensor is, and not what it holds: nothing is read and no device waits."""
        self._append(kind, place, item, self._meta(tensor), (0, math.nan, int(StateFlag.UNHASHED)), math.nan, call)

    def _append(
        self, kind: Value, place: str, item: int, meta: int, summary: tuple[int, float, int], number: float, call: int | None
    ) -> None:
        if len(self.rows) >= self.capacity:
            self.dropped += 1
            return
        fp, norm, flags = summary
        code = self.recorder.intern(int(Name.PLACE), place)
        seq = self.call if call is None else call
        self.rows.append((seq, self._context(), int(kind), code, item, meta, fp, norm, number, flags))

    def _meta(self, tensor: Any) -> int:
        with no_torch_function():
            dtype, shape, device = tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), tensor.device.type
        code = self._metas.get((dtype, shape, device))
        if code is None:
            facts = {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": json.dumps(list(shape), separators=(",", ":")),
                "device": device,
            }
            code = self.recorder.intern(int(Name.META), json.dumps(facts, sort_keys=True))
            if len(self._metas) < KEPT_METAS:
                self._metas[dtype, shape, device] = code
        return code

    def measured(
        self, kind: Value, place: str, facts: dict[str, str], summary: tuple[int, float, int], number: float, *, item: int, call: int
    ) -> None:
        """Append a row for what was measured elsewhere. `facts` is its meta."""
        self._append(kind, place, item, self.recorder.intern(int(Name.META), json.dumps(facts, sort_keys=True)), summary, number, call)

    def take_rows(self) -> list[tuple[Any, ...]]:
        return take(self.rows)


class Probe(ABC):
    """Looks at some functions and records values there.

    Attributes:
        over: its hooks and `step_begins` have nothing left to do. They run no more then, soon.
    """

    over = False
    name: ClassVar[str]
    kinds: ClassVar[frozenset[Value]]  # a probe none of whose kinds is wanted is not made
    steady: ClassVar[bool] = False  # its hooks run in steps that are not sampled, too

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    @abstractmethod
    def hooks(self, function: str, home: Home) -> Hooks:
        """What to run before and after this function; `NO_HOOKS` for most. Runs while the sink is live.

        A hook must neither change its arguments, nor draw random numbers, nor synchronise a device needlessly.
        """

    def step_begins(self, step: int) -> None:  # noqa: B027 - most probes have nothing to do
        """Step `step` is about to be counted; the present context is still that of the step before."""

    def thinned(self) -> None:  # noqa: B027
        """From now on some steps are left out. What needs all of them is recorded no more, and so unknown."""

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:  # noqa: B027
        """So many happened while no hook ran (`steps/asleep.py`): backwards, and collectives by their group, None: it was left to torch."""

    def closing(self) -> None:  # noqa: B027
        """The process says goodbye; last chance to append rows."""

    def facts(self) -> dict[str, Any]:
        """More keys of `process.json`; asked by the writer's thread at every flush."""
        return {}


class EarlyProbe(Probe):
    """A probe whose looks are dear: in the first steps alone, and so many of them.

    Attributes:
        left: looks that it may still take.
    """

    looks: ClassVar[int]

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.left = self.looks

    def step_begins(self, step: int) -> None:
        if step >= FIRST_STEPS:
            self.left, self.over = 0, True


_DISPATCHED = ("torch", "torch.Tensor", "torch.nn.functional", "torch.autograd")  # whose functions go to the `__torch_function__` of what they are given
_REGISTRY: dict[str, type[Probe]] = {}
_Hook = tuple[Probe | None, Callable[..., None]]  # whose it is: None, it was given to the tap


def register(cls: type[Probe]) -> type[Probe]:
    """Class decorator: makes a probe known under its name."""
    _REGISTRY[cls.name] = cls
    return cls


def registry() -> dict[str, type[Probe]]:
    """All probes by name; importing them is what registers them."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


class Probes:
    """The probes of one process behind the hooks of its taps.

    Args:
        sink: shared by all.
        guard: where errors of ours end.
    """

    def __init__(self, sink: Sink, guard: Guard) -> None:
        self.sink, self._guard, self._run = sink, guard, guard.run
        wanted = [p for p in registry().values() if any(sink.config.keeps(kind) for kind in p.kinds)]
        self._probes = [probe(sink) for probe in wanted]
        self._over: set[str] = set()  # labels of those that are
        self._beginning = [(f"values: {p.name}", p.step_begins) for p in self._probes if type(p).step_begins is not Probe.step_begins]

    def ends(self) -> dict[str, tuple[str, ...]]:
        """What is recorded no more when one of them is off, by the label it runs under."""
        return {f"values: {p.name}": tuple(f"{VALUES}{kind.name.lower()}" for kind in sorted(p.kinds)) for p in self._probes}

    def around(self, function: str, home: Home, before: Before | None = None, after: After | None = None) -> Hooks:
        """The hooks of a function: the given ones and those of all probes, as one each."""
        return self.both(function, home, before, after)[0]

    def both(self, function: str, home: Home, before: Before | None = None, after: After | None = None) -> tuple[Hooks, Hooks]:
        """As `around`, and what of it must run in steps that are left out: the given ones, and those of steady probes."""
        befores: list[_Hook] = [(None, before)] if before else []
        afters: list[_Hook] = []
        for probe in self._probes if self.sink.config.wants(function) else ():
            first, last = probe.hooks(function, home)
            if first is not None:
                befores.append((probe, first))
            if last is not None:
                afters.append((probe, last))
        if after:
            afters.append((None, after))
        steady = [[(probe, hook) for probe, hook in hooks if probe is None or probe.steady] for hooks in (befores, afters)]
        dispatched = function.rpartition(".")[0] in _DISPATCHED
        whole, lean = ([self._as_one(hooks, dispatched) for hooks in some] for some in ((befores, afters), steady))
        return (whole[0], whole[1]), (lean[0], lean[1])

    def step_begins(self, step: int) -> None:
        off, takes = self._guard.off, self._guard.takes
        for label, begins in self._beginning:  # as `Guard.run`, written out: a dozen calls a step
            if label in off:
                continue
            try:
                begins(step)
            except Exception as e:
                if not takes(label, e):
                    raise
        if step & (step - 1) == 0:  # now and then
            self._over.update(f"values: {probe.name}" for probe in self._probes if probe.over)
            self._beginning = [(label, begins) for label, begins in self._beginning if label not in self._over]

    def thinned(self) -> None:
        for probe in self._probes:
            self._run(f"values: {probe.name}", probe.thinned)

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:
        for probe in self._probes:
            self._run(f"values: {probe.name}", probe.slept, backwards, collectives)

    def closing(self) -> None:
        for probe in self._probes:
            self._run(f"values: {probe.name}", probe.closing)

    def facts(self) -> dict[str, Any]:
        """What the probes add to `process.json`."""
        out: dict[str, Any] = {}
        for probe in self._probes:
            out |= self._run(f"values: {probe.name}", probe.facts) or {}
        return out

    def _as_one(self, hooks: list[_Hook], dispatched: bool = False) -> Any:
        """Hooks as one. Those of probes run while rows are wanted, or always if steady; the given ones guard themselves."""
        if len(hooks) <= 1 and all(probe is None for probe, _ in hooks):
            return hooks[0][1] if hooks else None
        several = [("" if probe is None else f"values: {probe.name}", probe is None or probe.steady, hook) for probe, hook in hooks]
        return as_one(several, self.sink.wants, self._guard.off, self._over, self._guard.takes, dispatched=dispatched)
