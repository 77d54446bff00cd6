"""Which functions of torch, of libraries and of the process are tapped, and with which hooks."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt

from proctor.instrument.observe.refs import swapping
from proctor.instrument.patch import catalog
from proctor.instrument.patch.patches import ASIDE, METHOD, MODULE_CALL, Hooks
from proctor.instrument.probes import Home
from proctor.instrument.steps.asleep import COLLECTIVE, QUIET, act_of
from proctor.invariants.schema import MODEL_CALL

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

LOADER_WORKER = "torch.utils.data.worker"
Around = tuple[Callable[..., None] | None, Callable[..., None] | None]  # what runs before and after a call


class Taps:
    """The taps of one observer.

    Args:
        observer: its patches are laid, with the hooks of its steps, its structure, its probes and its capsules.

    Attributes:
        libraries: that an integration knows.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer, self._steps, self._structure = observer, observer.steps, observer.structure
        self.libraries: list[str] = []
        self._hooked: list[Any] = []  # those whose hooks must run at every step,
        self._spared: list[Any] = []  # of them, those that only look: not in steps that a budget leaves out,
        self._lean: list[tuple[Any, Around, Around]] = []  # and those that have fewer hooks there
        self._classes: set[type] = set()
        self._measured_already: set[str] = set()  # libraries whose version was looked at

    def lay(self) -> None:
        """Tap everything that the configuration asks for."""
        import torch
        from torch import nn

        capsules = self._observer.capsules
        hooks = self._steps.hooks() | self._structure.hooks()
        spared = self._steps.only_look() - self._structure.hooks().keys()
        for name, own in (capsules.hooks() if capsules is not None else {}).items():
            before, after = hooks.get(name, (None, None))
            if before is after is None and name not in capsules.EVERY_STEP:
                spared.add(name)
            hooks[name] = _chain([h for h in (before, own[0]) if h]), _chain([h for h in (after, own[1]) if h])
        for point in catalog.points():
            before, after = hooks.pop(point.name, (None, None))
            tap = self._tap(point, before, after)
            if tap is not None and point.name in spared:
                self._spared.append(tap)
                tap.act = QUIET
        self._observer.patches.reach_layers()
        self._tap_module_calls(nn.Module)
        self._tap_constructors(torch)
        self._tap_captures(torch)
        self._observer.patches.wrap(torch.utils, "swap_tensors", swapping)
        self._tap_process_exits()
        for name in catalog.LATE:
            wrapt.register_post_import_hook(self._late(catalog.late_points), name)
        self._install_integrations()

    def always(self, on: bool) -> None:
        """Whether hooks run, also those of calls that are not recorded."""
        for tap in self._hooked:
            tap.always = on

    def thin(self, on: bool) -> None:
        """Whether the present steps are left out: of the hooks only those run that tell steps."""
        for tap in self._spared:
            tap.always = not on
        for tap, whole, lean in self._lean:
            tap.before, tap.after = lean if on else whole

    def of_class(self, cls: type, name: str, methods: tuple[str, ...], hooks: Hooks) -> None:
        """Tap the methods of a class where it or a base defines them; once a class.

        Args:
            cls: met in the program.
            name: of the base that they are recorded under.
            methods: those to tap.
            hooks: by method.
        """
        if cls in self._classes:
            return
        found = [(owner, method) for owner in cls.__mro__ for method in methods if method in vars(owner)]
        if all(_binds(vars(owner)[method]) for owner, method in found):
            self._classes.add(cls)  # else again with its next object: what stands in for a method may be gone by then
        for owner, method in found:
            if _binds(vars(owner)[method]):
                before, after = hooks.get(method, (None, None))
                self._tap(catalog.Point(owner, method, f"{name}.{method}", METHOD), before, after)

    def _tap(self, point: catalog.Point, before: Any = None, after: Any = None, home: Home = Home.TORCH) -> Any:
        """The tap; None where there is nothing to patch."""
        wanted = self._observer.config.wants(point.name)
        ours = before is not None or after is not None
        (before, after), lean = self._observer.probes.both(point.name, home, before, after)
        if not wanted and not ours:
            return None
        tap = self._observer.patches.tap(
            point.owner, point.attribute, point.name, kind=point.kind, before=before, after=after, aliases=point.aliases
        )
        if tap is not None:
            tap.record = wanted
            tap.flat = point.name in catalog.RECURSIVE
            if ours:
                tap.always = True
                if point.name != LOADER_WORKER:  # runs in a child that is inert
                    self._hooked.append(tap)
                    self._keep_lean(tap, (before, after), lean)
                tap.act = act_of(point.name)
                if tap.act == COLLECTIVE:
                    tap.group_at = _position("group", tap.tapped)
        return tap

    def _keep_lean(self, tap: Any, whole: Around, lean: Around) -> None:
        if self._observer.sentinel is not None and whole != lean:
            ours = self._observer.patches.ours
            self._lean.append((tap, (tap.before, tap.after), (ours(lean[0]), ours(lean[1]))))

    def _tap_module_calls(self, module_class: Any) -> None:
        leaves = None if self._observer.capsules is None else self._observer.capsules.model_ends
        (before, after), lean = self._observer.probes.both(MODEL_CALL, Home.TORCH, self._steps.model_begins, leaves)
        tap = self._observer.patches.tap(
            module_class, "__call__", "torch.nn.Module.__call__", kind=MODULE_CALL, before=before, after=after
        )
        if tap is not None:
            tap.root_only = True  # hooks run at the outermost module only
            tap.always = True
            tap.record = not self._observer.config.selective or any(f.endswith(".forward") for f in self._observer.config.functions or ())
            tap.act = act_of(MODEL_CALL)
            self._hooked.append(tap)
            self._keep_lean(tap, (before, after), lean)

    def _tap_constructors(self, torch: Any) -> None:
        from torch.utils.data._utils import worker

        for owner, attribute, name, before, after in (
            (torch.optim.Optimizer, "__init__", "torch.optim.Optimizer.__init__", None, self._steps.updates.optimizer_created),
            (torch.optim.lr_scheduler.LRScheduler, "__init__", "torch.optim.lr_scheduler.LRScheduler.__init__",
             self._steps.updates.scheduler_created, None),
            (torch.optim.lr_scheduler.ReduceLROnPlateau, "__init__",
             "torch.optim.lr_scheduler.ReduceLROnPlateau.__init__", self._steps.updates.scheduler_created, None),
            (worker, "_worker_loop", LOADER_WORKER, self._observer.loader_worker, None),
        ):
            self._tap(catalog.Point(owner, attribute, name, METHOD), before, after)

    def _tap_captures(self, torch: Any) -> None:
        """What writes a model down as a graph calls it with tensors that stand for others: nothing of that is training, and to read them would be written down."""
        places = (torch.jit, "trace"), (torch.jit, "trace_module"), (torch.fx.Tracer, "trace"), (torch.export, "export"), (torch.onnx, "export")
        for owner, attribute in places:
            home = sys.modules.get(getattr(vars(owner).get(attribute), "__module__", ""))
            self._observer.patches.tap(owner, attribute, f"{owner.__name__}.{attribute}", kind=ASIDE, aliases=() if home is None else (home,))

    def _tap_process_exits(self) -> None:
        """Flush before the process image goes away without Python's own exit."""
        for name in ("_exit", "execv", "execve", "execvp", "execvpe"):
            original = getattr(os, name)

            def leaving(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if not self._observer.inert:
                    self._observer.guard.run("exit", self._observer.close, True)
                return _original(*args, **kwargs)

            leaving.__name__, leaving.__doc__, leaving.__module__ = name, original.__doc__, "os"
            self._observer.patches.replace(os, name, leaving)

    def _late(self, points: Callable[[Any], Any], home: Home = Home.TORCH) -> Callable[[Any], None]:
        def imported(module: Any) -> None:
            self._observer.guard.run(f"late {module.__name__}", self._tap_late, points, module, home)

        return imported

    def _tap_late(self, points: Callable[[Any], Any], module: Any, home: Home) -> None:
        for point in points(module):
            after = self._structure.sharded if point.attribute in ("fully_shard", "parallelize_module") else None
            self._tap(point, None, after, home)
        if module.__name__ == "torch.distributed.device_mesh":
            point = catalog.Point(
                module.DeviceMesh, "__init__", "torch.distributed.device_mesh.DeviceMesh.__init__", METHOD
            )
            self._tap(point, None, self._structure.mesh_created)

    def _install_integrations(self) -> None:
        from proctor.instrument import integrations

        for info in pkgutil.iter_modules(integrations.__path__):
            library = importlib.import_module(f"{integrations.__name__}.{info.name}")
            self.libraries.append(library.LIBRARY)
            for module, methods in library.POINTS.items():
                points = _of_library(library.LIBRARY, methods)
                wrapt.register_post_import_hook(self._late(points, Home.LIBRARY), module)
                wrapt.register_post_import_hook(self._measured(library.LIBRARY, library.TRIED, methods), module)

    def _measured(self, library: str, tried: tuple[str, str], methods: dict[str, tuple[str, ...]]) -> Callable[[Any], None]:
        def imported(module: Any) -> None:
            self._observer.guard.run(f"version of {library}", self._measure, library, tried, methods, module)

        return imported

    def _measure(self, library: str, tried: tuple[str, str], methods: dict[str, tuple[str, ...]], module: Any) -> None:
        """What the installed version lacks may have gone to another place: rules about its absence are unknown. A version that nobody tried is said."""
        self._observer.unseen.extend(catalog.lacking(module, library, methods))
        if library in self._measured_already:
            return
        self._measured_already.add(library)
        found = catalog.untried(library, tried)
        if found:
            self._observer.output.notes.append(f"{library} {found} was not tried with this version of Proctor ({' to '.join(tried)} were); it is observed all the same")


def _chain(hooks: list[Any]) -> Any:
    """Several hooks of one kind as one; `None` for none."""
    if len(hooks) <= 1:
        return hooks[0] if hooks else None
    several = tuple(hooks)

    def chained(*args: Any) -> None:
        for hook in several:
            hook(*args)

    return chained


def _position(name: str, function: Any) -> int:
    """Of a parameter among those of a function, -1 where it has none of this name."""
    try:
        return list(inspect.signature(function).parameters).index(name)
    except (TypeError, ValueError):
        return -1


def _of_library(library: str, methods: dict[str, tuple[str, ...]]) -> Callable[[Any], Any]:
    def points(module: Any) -> Any:
        return catalog.library_points(module, library, methods)

    return points


def _binds(method: Any) -> bool:
    """Whether it is called with its object; `Mock`, with which a test replaces a method, is not."""
    return hasattr(type(method), "__get__")
