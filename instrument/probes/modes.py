"""What an evaluation leaves behind in a model: modes of its modules, and numbers that decide what they do.

Rows of `Value.KEPT`. A model is looked at in its first forwards in training mode and in the first one behind its first evaluation (a forward of the model, or of a
part of it, in evaluation mode). What was the same in all looks before has to be the same behind it. `mode`: modules that drop out or normalise by batches, which
trained in evaluation mode and now do not (`on`), or the whole of what was evaluated that stays in evaluation mode (`off`). `number`: a plain number of a module of
torch, or one that the evaluation's own forward changed. Later evaluations are not looked at: who sets modes anew in the second epoch does it on purpose.

Cost: a walk over the modules in four forwards of a model, and two in the first eight forwards of its first evaluation.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

_MODELS: Final = 8
_LOOKS: Final = 3  # before the evaluation
_LEAST: Final = 2
_MODULES: Final = 4096
_ROWS: Final = 4  # of one comparison
_WALKS: Final = 8  # forwards of an evaluation around which numbers are compared

Numbers = dict[tuple[str, str], Any]  # by path of the module and name


class _Look(NamedTuple):
    """A model in training."""

    modes: dict[str, bool]
    frozen: dict[str, tuple[bool, ...]]  # of the parameters of each module and of those in it
    numbers: Numbers


class _Known:
    """What is known of one model."""

    def __init__(self, root: Any) -> None:
        self.ref = weakref.ref(root)
        self.looks: list[_Look] = []
        self.parts: dict[int, str] = {}  # ids of its modules, by the last look
        self.evaluated: set[str] = set()  # paths of what was called in evaluation mode since
        self.changed: set[tuple[str, str]] = set()  # numbers that such a call changed
        self.walks = 0
        self.over = False


@register
class Modes(Probe):
    """Modes and numbers of modules around an evaluation."""

    name = "modes"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: dict[int, _Known] = {}
        self._open: tuple[_Known, Numbers] | None = None

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._begins, self._ends) if function == MODEL_CALL else NO_HOOKS

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        root = args[0]
        if not getattr(root, "training", False):
            self._evaluation(root)
            return
        known = self._known.get(id(root))
        if known is None or known.ref() is not root:
            if len(self._known) >= _MODELS or not any(p.requires_grad for p in plainly.parameters(root)):
                return
            known = self._known[id(root)] = _Known(root)
        if known.over:
            return
        if known.evaluated:
            known.over = True
            self._compare(known, _look(root))
        elif len(known.looks) < _LOOKS:
            modules = list(plainly.named_modules(root))[:_MODULES]
            known.parts = {id(module): path for path, module in modules}
            known.looks.append(_look(root))

    def _evaluation(self, root: Any) -> None:
        for known in self._known.values():
            path = known.parts.get(id(root))
            if path is None or known.over or len(known.looks) < _LEAST:
                continue
            whole = known.ref()
            if whole is None:
                continue
            known.evaluated.add(path)
            if known.walks < _WALKS:
                known.walks += 1
                self._open = known, _numbers(whole)

    def _ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        opened, self._open = self._open, None
        if opened is None or (whole := opened[0].ref()) is None:
            return
        now = _numbers(whole)
        opened[0].changed.update(key for key, value in opened[1].items() if _differ(value, now.get(key, value)))

    def _compare(self, known: _Known, now: _Look) -> None:
        root, before = known.ref(), known.looks[-1]
        if root is None:
            return
        if all(look.modes == before.modes for look in known.looks):
            self._tell("mode", _switched(root, known, before, now))
        steady = [key for key, value in before.numbers.items() if all(not _differ(look.numbers.get(key), value) for look in known.looks)]
        modules = dict(plainly.named_modules(root))
        told = [
            (".".join(filter(None, key)), f"{before.numbers[key]:.6g} in training before the evaluation, {now.numbers[key]!r} behind it")
            for key in steady
            if key in now.numbers and _differ(before.numbers[key], now.numbers[key]) and (key in known.changed or type(modules[key[0]]).__module__.startswith("torch.nn."))
        ]
        if steady:
            self._tell("number", told)

    def _tell(self, what: str, told: list[tuple[str, str]]) -> None:
        """One row for each thing that is not as it was, or one that says that all are."""
        for place, seen in told[:_ROWS] or [("", "")]:
            self.sink.number(place, float(len(told)), kind=Value.KEPT, facts={"what": what, "seen": seen})


def _look(root: Any) -> _Look:
    modules = list(plainly.named_modules(root))[:_MODULES]
    frozen = {path: tuple(p.requires_grad for p in plainly.parameters(module)) for path, module in modules}
    return _Look({path: module.training for path, module in modules}, frozen, _numbers(root))


def _numbers(root: Any) -> Numbers:
    """Plain numbers of the modules, without what they keep for themselves."""
    found: Numbers = {}
    for path, module in list(plainly.named_modules(root))[:_MODULES]:
        for key, value in vars(module).items():
            if type(value) in (int, float) and not key.startswith("_"):
                found[path, key] = value
    return found


def _differ(a: Any, b: Any) -> bool:
    """Whether a share or rate became another; whole numbers count, and a NaN says nothing."""
    return (type(a) is float or type(b) is float) and a == a and b == b and a != b


def _switched(root: Any, known: _Known, before: _Look, now: _Look) -> list[tuple[str, str]]:
    """Modules whose mode matters and is another than it was, with what tells that nobody meant it."""
    import torch

    def acts(module: Any) -> bool:
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            return bool(module.track_running_stats) or isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return bool(module.p > 0)
        share = getattr(module, "dropout", 0.0) if isinstance(module, torch.nn.MultiheadAttention | torch.nn.RNNBase) else 0.0
        return isinstance(share, float) and share > 0

    modules = {path: m for path, m in plainly.named_modules(root) if path in before.modes and path in now.modes}
    acting = [path for path, m in modules.items() if path and acts(m)]
    # Who lets a layer train again, or freezes it, sets its mode on purpose.
    same = {path for path in acting if _frozen_near(before, path) == _frozen_near(now, path)}
    on = [path for path in acting if path in same and not before.modes[path] and now.modes[path]]
    told = [(path, f"{path} ({type(modules[path]).__name__}) in evaluation mode while the model trained, in training mode since the evaluation") for path in on]
    # The root is in training mode, so a wrapper was set to it and what it wraps was not; or a part was evaluated by itself.
    children = [path for path, _ in root.named_children()]
    parts = [*(known.evaluated - {""}), *(children if len(children) == 1 else [])]
    for part in parts:
        inner = [path for path in modules if path == part or path.startswith(f"{part}.")]
        mine = [path for path in inner if path in acting and before.modes[path]]
        if mine and same.issuperset(mine) and not any(now.modes[path] for path in inner):
            kinds = f"{type(modules[part]).__name__}, with {type(modules[mine[0]]).__name__} {mine[0]} in it,"
            told.append((mine[0], f"{kinds} in evaluation mode since it was evaluated, where it was in training mode before, and the model trains"))
            break
    return told


def _frozen_near(look: _Look, path: str) -> tuple[bool, ...]:
    """Which parameters train in a module, or in the nearest that has some and that it lies in."""
    while path and not look.frozen.get(path):
        path = path.rpartition(".")[0]
    return look.frozen.get(path, ())
