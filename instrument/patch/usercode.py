"""Functions of the user's own modules, observed like torch's.

A user's module is one whose file is neither the standard library's nor an installed package's. Its functions and the
methods of its classes are tapped when the process begins to train, in every namespace of the user's that holds them;
modules that are imported later, and functions that the script defines behind its model, are found at the next step. Left alone: dunder methods but `__call__` and `__init__`, `forward` of
modules (the call of the module is recorded), generators, coroutines, properties, and autograd functions.

Left alone too: a function that is held anywhere but in the user's namespaces (a registry, a callback) and by its own running calls,
told by its reference count. Such a program may ask `fn is loss_a`, and a tap is equal to its function but not identical.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from proctor.instrument.patch.compiled import guarded
from proctor.instrument.patch.patches import METHOD, PLAIN, Patches
from proctor.instrument.probes import Home, Probes
from proctor.invariants.codec.definition import sketch_of
from proctor.native import is_tap

_COMPILED = "torch_dynamo_resume_in_"  # code of what Dynamo puts into a module of the program to go on behind a break
_MAX_FUNCTIONS = 5000
_MAX_DEFINITIONS = 400  # of functions and classes; they go with all that a process says of itself
_OURS = 2  # references that `sys.getrefcount(value)` sees from here: the local name and its own argument


def library_prefixes() -> tuple[str, ...]:
    """Folders whose code is not the user's: standard library, installed packages, Proctor itself."""
    paths = {sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.dirname(os.__file__), *(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))}
    own = os.path.dirname(os.path.abspath(str(getattr(sys.modules.get("__main__"), "__file__", None) or getattr(sys, "argv", [""])[0])))
    paths |= {path for p in sys.path if p and (path := os.path.abspath(p)) != own and _holds_packages(path)}
    import proctor

    paths.add(os.path.dirname(os.path.abspath(proctor.__file__)))
    paths |= {os.path.dirname(os.path.abspath(m.__file__)) for n in ("instrument", "invariants", "native")
              if (m := sys.modules.get(f"proctor.{n}")) is not None and m.__file__}
    return tuple(sorted(p.rstrip("/") + "/" for p in paths if p))


@cache
def _holds_packages(folder: str) -> bool:
    """Whether packages are installed in a folder by an installer, as `pip --target`, zipped environments and build systems have them elsewhere."""
    try:
        return any(entry.endswith(".dist-info") for entry in os.listdir(folder))
    except OSError:
        return False


def _running() -> Counter[types.CodeType]:
    """How many calls of each function run, on all threads; each of them holds its function."""
    found: Counter[types.CodeType] = Counter()
    for frame in sys._current_frames().values():
        while frame is not None:
            found[frame.f_code] += 1
            frame = frame.f_back  # type: ignore[assignment]
    return found


class UserCode:
    """Finds and taps the user's functions."""

    def __init__(self, patches: Patches, prefixes: tuple[str, ...], wants: Callable[[str], bool], probes: Probes) -> None:
        self._patches = patches
        self._probes = probes
        self._prefixes = prefixes
        self._wants = wants
        self._seen: set[str] = set()
        self._judged: dict[str, tuple[int, bool]] = {}  # by name: a module's id, and whether it is the program's
        self._modules = self._script = 0  # how many there were, and names in the script
        self._running: Counter[types.CodeType] = Counter()
        self._compiling = False
        self._guarded: list[tuple[str, Any]] = []  # methods that cannot have a tap where the program compiles, and their taps: two classes may have one name
        self.names: dict[str, Any] = {}
        self.definitions: dict[str, str] = {}  # sketches of module-level functions and classes, by name
        self.left_alone: list[str] = []  # functions that are held elsewhere, and so not observed

    def sweep(self) -> int:
        """Tap what is new; returns how many functions. Costs two dict lengths when nothing was imported or defined."""
        script = sys.modules.get("__main__")
        names = len(vars(script)) if isinstance(script, types.ModuleType) else 0
        if len(sys.modules) == self._modules and names == self._script:
            return 0
        self._modules, self._script = len(sys.modules), names
        before, self._running = len(self.names), _running()
        users = [m for n, m in sys.modules.copy().items() if self._is_user(n, m)]
        for module in users:
            if module.__name__ not in self._seen or module is script:
                self._seen.add(module.__name__)
                self._tap_module(module, users)
        return len(self.names) - before

    def drop(self, name: str) -> bool:
        """Stop observing one function (called far too often)."""
        tap = self.names.get(name)
        if tap is None:
            return False
        self._patches.drop(tap)
        return True

    def compiles(self) -> None:
        """The program gives something to `torch.compile`: methods that Dynamo guards as functions are not observed from now on (`compiled.py`)."""
        self._compiling = True
        for name, tap in self._guarded:
            self._patches.drop(tap)
            self.names.pop(name, None)
            self._leave(name)
        self._guarded.clear()

    def _is_user(self, name: str, module: Any) -> bool:
        """Whether a module is the program's; asked once of each, but of the script, which may be given a file later."""
        known = self._judged.get(name)
        if known is None or known[0] != id(module) or name == "__main__":
            known = self._judged[name] = id(module), self._lies_outside(name, module)
        return known[1]

    def _lies_outside(self, name: str, module: Any) -> bool:
        if not isinstance(module, types.ModuleType) or type(module).__setattr__ is not types.ModuleType.__setattr__ or name.split(".")[0] in ("proctor", "sitecustomize"):
            return False
        path = getattr(module, "__file__", None)
        return isinstance(path, str) and bool(path) and not os.path.abspath(path).startswith(self._prefixes)

    def _tap_module(self, module: Any, users: list[Any]) -> None:
        place = "__main__" if module.__name__ in ("__main__", "__mp_main__") else module.__name__
        for attribute in list(vars(module)):
            value = vars(module).get(attribute)
            if len(self.names) >= _MAX_FUNCTIONS:
                return
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, types.FunctionType) and value.__code__.co_name.startswith(_COMPILED):
                continue
            if isinstance(value, types.FunctionType | type):
                self._define(f"{place}.{attribute}", value)
            if isinstance(value, types.FunctionType) and not is_tap(value):
                aliases = [m for m in users if m is not module and vars(m).get(attribute) is value]
                if not _plain(value):
                    continue
                if sys.getrefcount(value) <= _OURS + 1 + len(aliases) + self._running[value.__code__]:
                    self._tap(module, attribute, f"{place}.{attribute}", PLAIN, aliases)
                else:
                    self._leave(f"{place}.{attribute}")
            elif isinstance(value, type):
                self._tap_class(value, place)

    def _leave(self, name: str) -> None:
        if name not in self.left_alone:
            self.left_alone.append(name)

    def _define(self, name: str, value: Any) -> None:
        if len(self.definitions) < _MAX_DEFINITIONS and (sketch := sketch_of(value)):
            self.definitions[name] = sketch

    def _tap_class(self, cls: type, place: str) -> None:
        from torch.autograd import Function
        from torch.nn import Module

        if issubclass(cls, Function | BaseException | tuple) or hasattr(cls, "__torch_function__"):
            return
        for attribute in list(vars(cls)):
            if attribute.startswith("__") and attribute not in ("__call__", "__init__"):
                continue
            if attribute == "__init__" and (type(cls) is not type or hasattr(cls, "__dataclass_fields__")):
                continue  # made by a metaclass or a decorator, which may look at it
            value = vars(cls).get(attribute)
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if not isinstance(function, types.FunctionType) or is_tap(function) or not _plain(function):
                continue
            # A static or class method holds its function twice (`__func__`, `__wrapped__`); otherwise `value` is ours too.
            if sys.getrefcount(function) > _OURS + 2 + self._running[function.__code__]:
                self._leave(f"{place}.{cls.__qualname__}.{attribute}")
                continue
            if issubclass(cls, Module) and attribute in ("forward", "__call__", "extra_repr"):
                continue
            kind, name = PLAIN if isinstance(value, staticmethod) else METHOD, f"{place}.{cls.__qualname__}.{attribute}"
            asks = kind == METHOD and guarded(function)
            if asks and self._compiling:
                self._leave(name)
                continue
            tap = self._tap(cls, attribute, name, kind, [])
            if asks and tap is not None:
                self._guarded.append((name, tap))

    def _tap(self, owner: Any, attribute: str, name: str, kind: int, aliases: list[Any]) -> Any:
        if not self._wants(name):
            return None
        before, after = self._probes.around(name, Home.USER)
        tap = self._patches.tap(owner, attribute, name, kind=kind, before=before, after=after, aliases=aliases)
        if tap is not None:
            self.names[name] = tap
        return tap


def _plain(function: Any) -> bool:
    """A function that does its work when called (no generator, coroutine or abstract method)."""
    return not (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or getattr(function, "__isabstractmethod__", False)
    )
