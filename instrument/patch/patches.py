"""Taps: functions that are recorded when they are called, and how to put the originals back (`replaced.py`).

The observer has one `Patches`; `taps.py` and `usercode.py` tap functions through it, what `steps/`, `observe/` and probes want to see are hooks of these taps. In: an owner, an
attribute and hooks. Out: a tap in its place (`native.Tap`) that calls the original with what it was given and returns what it returned. `remove`
puts back all that nobody replaced after us.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from proctor.instrument.patch.hooks import Timed, measured, unseen
from proctor.instrument.patch.replaced import MISSING, Replaced, Replacement
from proctor.native import Recorder, Tap, is_tap

PLAIN, METHOD, MODULE_CALL, ASIDE = range(4)


Hooks = dict[str, tuple[Callable[..., None] | None, Callable[..., None] | None]]  # by function: what runs before and after


class Patches(Replaced):
    """Taps that are in place, and how to remove them."""

    def __init__(self, recorder: Recorder, meter: Timed | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self._meter = meter
        self._taps: dict[int, Tap] = {}  # id(original) → tap, so that aliases share one
        self._keep: list[Any] = []  # originals whose id is a key above
        self._names: dict[int, str] = {}  # id of an original → what it is recorded under
        self._shown: set[tuple[int, str]] = set()  # (id of an owner, attribute) where a tap was put with its first name
        self._script_ids: list[int] = []  # entries of ours in TorchScript's table
        self._defaults: list[tuple[types.FunctionType, Any, Any]] = []  # function, its default arguments, ours

    def tap(
        self,
        owner: Any,
        attribute: str,
        name: str,
        *,
        kind: int = PLAIN,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
        aliases: Iterable[Any] = (),
    ) -> Tap | None:
        """Put a tap around `owner.attribute` and wherever `aliases` hold the same object.

        Returns:
            the tap; `None` where there is nothing to patch, or where it is patched already.
        """
        raw = vars(owner).get(attribute, MISSING)
        if raw is MISSING and isinstance(owner, type):
            raw = getattr(owner, attribute, MISSING)  # inherited from a C class: `Tensor.add_`
        if raw is MISSING:
            return None
        function: Any = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        if is_tap(function) and (id(owner), attribute) in self._shown:
            function = function.tapped
        if not callable(function) or is_tap(function):
            return None
        tap = self._taps.get(id(function))
        if tap is None:
            code = self.recorder.intern(0, name)
            tap = Tap(self.recorder, function, code, kind, self.ours(before), self.ours(after))
            self._taps[id(function)] = tap
            self._keep.append(function)
            self._names[id(function)] = name
            self._known_to_torchscript(function, tap)
        ours: Any = type(raw)(tap) if isinstance(raw, staticmethod | classmethod) else tap
        if raw is not ours:
            self.replace(owner, attribute, ours)
        self._known_to_dispatch(function, tap)
        for alias in aliases:
            if vars(alias).get(attribute) is function:
                self.replace(alias, attribute, tap)
        return tap

    def ours(self, hook: Callable[..., None] | None) -> Callable[..., None] | None:
        """A hook as a tap has it."""
        if hook is None:
            return None
        chain = unseen(hook)
        return chain if self._meter is None else measured(chain, self._meter)

    def aside(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A function as something else than a tap may call it: no mode of the program's sees what it reads. Not timed."""
        return unseen(hook)

    def _known_to_torchscript(self, function: Any, tap: Tap) -> None:
        """TorchScript finds builtins by `id`; without an entry a script that calls `torch.cat` would not compile."""
        builtins = sys.modules.get("torch.jit._builtins")
        table = getattr(builtins, "_builtin_table", None)  # None: not built yet, and then built with the taps in it
        if table is not None and id(function) in table:
            table[id(tap)] = table[id(function)]
            self._script_ids.append(id(tap))

    def _known_to_dispatch(self, function: Any, tap: Tap) -> None:
        """Have `__torch_function__` given the tap, so that `func is torch.cat` decides in there as it does without us.

        A function of torch hands on what stands at its own name: C code in the object that it comes from, Python code in its module. All names that torch
        gives a C function show the tap then; but its own layers, which call through `torch._VF`, go past it as before.
        """
        import torch

        attribute = function.__name__
        if type(function) is types.FunctionType:
            name = function.__module__ or ""
            home: Any = sys.modules.get(name)
            if home is not None and name.partition(".")[0] == "torch" and vars(home).get(attribute) is function:
                self.replace(home, attribute, tap)
        elif type(function) is types.BuiltinFunctionType:
            for home in (type(torch._C._VariableFunctions), torch._C._nn):
                found = vars(home).get(attribute)
                if found is function or getattr(found, "__func__", None) is function:
                    self.replace(home, attribute, tap)
                    self.replace(torch._VF, attribute, function)
                    for place in (torch, torch.nn.functional):
                        if vars(place).get(attribute) is function:
                            self.replace(place, attribute, tap)
                            self._shown.add((id(place), attribute))

    def reach_names(self) -> list[str]:
        """Tap the names that modules have bound to our functions already (`from library import function`).

        Needed where we come after the program's imports. A module of torch keeps its own names, as it does where we come
        at the end of `import torch`.

        Returns:
            functions that can still be called past their tap: a bound method of them is held somewhere.
        """
        wrapped = [u for u in self._undo if isinstance(u, Replacement) and isinstance(u.ours, types.FunctionType) and isinstance(u.owner, types.ModuleType)]
        ours: dict[int, Any] = {**self._taps, **{id(u.original): u.ours for u in wrapped}}
        for name, module in sys.modules.copy().items():
            if name.split(".")[0] in ("torch", "proctor") or not isinstance(module, types.ModuleType):
                continue
            for attribute, value in list(vars(module).items()):
                if id(value) in ours:
                    self.replace(module, attribute, ours[id(value)])
        things = gc.get_objects()
        self._reach_defaults(thing for thing in things if type(thing) is types.FunctionType)
        self._reach_attributes(things)
        bound = (thing.__func__ for thing in things if type(thing) is types.MethodType)
        return sorted({self._names[id(function)] for function in bound if id(function) in self._names})

    def reach_layers(self) -> None:
        """Tap our functions where torch's layers have them as default arguments.

        A layer made with `activation=F.relu` by default keeps that very object. `activation is F.relu` decides how it computes,
        and pickle takes a function only if it stands at its name. Called at the end of `import torch`; 4 ms.
        """
        classes = {
            id(value): value
            for name, module in sys.modules.copy().items() if name.startswith("torch.nn.")
            for value in list(vars(module).values()) if isinstance(value, type)
        }  # fmt: skip
        self._reach_defaults(f for c in classes.values() for f in vars(c).values() if type(f) is types.FunctionType)

    def _reach_defaults(self, functions: Iterable[types.FunctionType]) -> None:
        for function in functions:
            defaults = function.__defaults__
            if defaults and any(id(value) in self._taps for value in defaults):
                ours = tuple(self._taps.get(id(value), value) for value in defaults)
                self._defaults.append((function, defaults, ours))
                function.__defaults__ = ours

    def _reach_attributes(self, things: Iterable[Any]) -> None:
        """Layers that the program has made already hold functions as attributes: `self.act = F.relu`."""
        import torch

        for layer in [thing for thing in things if issubclass(type(thing), torch.nn.Module)]:
            for attribute, value in list(vars(layer).items()):
                tap = self._taps.get(id(value))
                if tap is not None:
                    vars(layer)[attribute] = tap

    def drop(self, tap: Tap) -> None:
        """Remove one tap everywhere it stands."""
        keep: list[Callable[[], None]] = []
        for undo in self._undo:
            ours = undo.ours if isinstance(undo, Replacement) else None
            if (ours.__func__ if isinstance(ours, staticmethod | classmethod) else ours) is tap:
                undo()
            else:
                keep.append(undo)
        self._undo = keep

    def remove(self) -> None:
        """Put every original back."""
        super().remove()
        while self._defaults:
            function, original, ours = self._defaults.pop()
            if function.__defaults__ is ours:
                function.__defaults__ = original
        table = getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None) or {}
        for key in self._script_ids:
            table.pop(key, None)
        self._script_ids.clear()
        self._taps.clear()
        self._shown.clear()
        self._names.clear()
        self._keep.clear()
