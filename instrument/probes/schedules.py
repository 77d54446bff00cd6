"""Whether a scheduler that is built is ever stepped.

One row of `Value.KEPT`, `stepped`, for each scheduler whose optimizer updates in a second pass over all that it trains on, or behind a second evaluation: by then it has stepped. One that has not says nothing where the program
may step it later: where some line of the program's own code, besides those that the optimizers update at, speaks of a `step` (a warm-up without the scheduler; an environment that is stepped looks alike),
where a library updates the optimizer, where an optimizer has several schedulers, or where the rate moves without it.

A loader's pass is known by the loader and not by the line that asks for it, so that a loop that asks its iterator for batches counts, too. Cost: some Python at each pass, backward pass and update of
an optimizer with a scheduler; once in a run, a look at the code of the program's own functions.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Final

from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._askers import Askers
from proctor.invariants.schema import Value
from proctor.native import is_tap

_MADE: Final = "torch.optim.lr_scheduler.LRScheduler.__init__"
_UPDATE: Final = "torch.optim.Optimizer.step"
_ITER: Final = "torch.utils.data.DataLoader.__iter__"
_NEXT: Final = "torch.utils.data.DataLoader.__next__"
_BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})
_SCHEDULERS: Final = 16
_LOADERS: Final = 64
_LINES: Final = 64  # at which optimizers update
_EVALUATIONS: Final = 2
_CODES: Final = 4000  # functions of the program that are looked at


class _Scheduler:
    """A scheduler that has not been spoken of."""

    def __init__(self, scheduler: Any) -> None:
        self.ref, self.optimizer = weakref.ref(scheduler), weakref.ref(scheduler.optimizer)
        self.epoch = getattr(scheduler, "last_epoch", None)
        self.rates = _rates(scheduler.optimizer)


class _Loader:
    """A loader whose batches may be trained on."""

    def __init__(self, loader: Any) -> None:
        self.ref = weakref.ref(loader)
        self.trains = False  # in some pass, since the last scheduler was built
        self.trained = False  # in this pass
        self.over = 0  # passes that were trained on, begun and ended since then

    def again(self) -> None:
        """A scheduler was built: the rest of the present pass does not count."""
        self.trains, self.over = False, -1 if self.trained else 0


@register
class Schedules(Probe):
    """Schedulers that never step."""

    name = "schedules"
    kinds = frozenset({Value.KEPT})
    steady = True

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._prefixes, self._askers = library_prefixes(), Askers()
        self._known: list[_Scheduler] = []
        self._loaders: dict[int, _Loader] = {}
        self._iterators: dict[int, _Loader] = {}
        self._asked: dict[int, int] = {}  # batches that each loader gave since the last backward pass
        self._evaluations = 0  # since the last scheduler was built
        self._newest: _Loader | None = None
        self._lines: set[tuple[str, int]] = set()

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _BACKWARDS:
            return None, self._propagated
        return {_MADE: (None, self._made), _UPDATE: (self._updates, None), _ITER: (None, self._begun), _NEXT: (None, self._given)}.get(function, NO_HOOKS)

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:
        if backwards and self._newest is not None:
            self._newest.trained = self._newest.trains = True

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if raised or getattr(args[0], "optimizer", None) is None or len(self._known) >= _SCHEDULERS:
            return
        self._known.append(_Scheduler(args[0]))
        self._evaluations = 0
        for loader in self._loaders.values():
            loader.again()

    def _begun(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if raised or not self._known:
            return
        loader = self._loaders.get(id(args[0]))
        if loader is None or loader.ref() is not args[0]:
            self._loaders = {key: known for key, known in self._loaders.items() if known.ref() is not None}
            if len(self._loaders) >= _LOADERS:
                return
            loader = self._loaders[id(args[0])] = _Loader(args[0])
        if loader.trained:
            loader.over += 1
        loader.trained = False
        self._iterators = {id(result): loader, **dict(list(self._iterators.items())[:15])}
        self._newest = loader

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        loader = self._iterators.get(id(args[0]))
        if loader is not None and not raised:
            self._asked[id(loader)] = self._asked.get(id(loader), 0) + 1

    def _propagated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not self._asked:
            return
        # Who was asked for more batches than another was evaluated on.
        fewest = min(self._asked.values(), default=0)
        trains = any(loader.trains for loader in self._loaders.values())
        for loader in self._iterators.values() if fewest else ():
            if self._asked.get(id(loader)) == fewest:
                loader.trained = loader.trains = True
        self._evaluations += trains and any(count > fewest for count in self._asked.values())
        self._asked.clear()

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        mine = [known for known in self._known if known.optimizer() is args[0]]
        if not mine:
            return
        frame = self._askers.of(sys._getframe())
        if frame is not None and len(self._lines) < _LINES:
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        loaders = [loader for loader in self._loaders.values() if loader.trains and loader.ref() is not None]
        again = bool(loaders) and all(loader.over >= 1 for loader in loaders)
        if not again and self._evaluations < _EVALUATIONS:
            return
        self._known = [known for known in self._known if known not in mine]
        scheduler = mine[0].ref()
        if len(mine) > 1 or scheduler is None or mine[0].epoch is None:
            return
        never = scheduler.last_epoch == mine[0].epoch
        if never and (_rates(args[0]) != mine[0].rates or frame is None or self._speaks_of_it(frame)):
            return
        seen = f"{type(scheduler).__name__} of {type(args[0]).__name__} has never stepped, {'in a second pass over the data' if again else 'behind a second evaluation'}, and no line of the program steps it" if never else ""
        self.sink.number(type(scheduler).__name__, float(never), kind=Value.KEPT, facts={"what": "stepped", "seen": seen})

    def _speaks_of_it(self, frame: types.FrameType) -> bool:
        """Whether the program's own code has another line that loads an attribute `step`; also where there is too much of it."""
        for number, code in enumerate(_codes(frame, self._prefixes)):
            if number >= _CODES:
                return True
            if "step" not in code.co_names:
                continue
            line = code.co_firstlineno
            for instruction in dis.get_instructions(code):
                line = instruction.starts_line or line
                if instruction.argval == "step" and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and (code.co_filename, line) not in self._lines:
                    return True
        return False


def _rates(optimizer: Any) -> list[Any]:
    return [float(rate) if isinstance(rate := group.get("lr"), int | float) else None for group in optimizer.param_groups]


def _codes(frame: types.FrameType | None, prefixes: tuple[str, ...]) -> Iterator[types.CodeType]:
    """The code of the program's functions: those that run, those of its modules, and what lies within them. No object of the program's is asked for anything."""
    waiting: list[Any] = []
    while frame is not None:
        waiting.append(frame.f_code)
        frame = frame.f_back
    modules = [m for n, m in sys.modules.copy().items() if issubclass(type(m), types.ModuleType) and (n == "__main__" or not _library(m.__dict__.get("__file__"), prefixes))]
    names = {m.__dict__.get("__name__") for m in modules}
    for module in modules:
        waiting.extend(list(module.__dict__.values()))
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if is_tap(value):
            value = value.tapped
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)  # `isinstance` would ask a proxy for its class
        if kind is types.CodeType:
            if not _library(value.co_filename, prefixes):
                yield value
                waiting.extend(c for c in value.co_consts if type(c) is types.CodeType)
        elif issubclass(kind, type):
            if type.__getattribute__(value, "__dict__").get("__module__") in names:
                waiting.extend(list(type.__getattribute__(value, "__dict__").values()))
        elif kind in (staticmethod, classmethod, types.MethodType):
            waiting.append(value.__func__)
        elif kind is property:
            waiting.append(value.fget)
        elif kind is types.FunctionType:
            waiting.append(value.__code__)
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not yet filled
                    waiting.append(cell.cell_contents)


def _library(file: Any, prefixes: tuple[str, ...]) -> bool:
    """Whether a file is no program's: an installed package's, or none."""
    return not isinstance(file, str) or os.path.abspath(file).startswith(prefixes)
