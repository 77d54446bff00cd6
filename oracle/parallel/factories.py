"""Tensors that a forward makes out of nothing: positions, masks, slopes of heads, of which a rank needs a part (veScale's `plan.factory`).

    [[factory]]                        # sizes are those of one device: this rank gets its part
    module = '.*attention'
    layout = { tp = 0 }

    [[factory]]                        # positions are counted over the part that a rank has of the time: they go on where the rank before stopped
    module = 'embedding'
    layout = { sp = 0 }
    sizes = "part"
    names = ["arange"]

Called by `run`, which puts `inside` around the forwards of the modules that a rule matches; the innermost one counts. Only there does torch ask
us about each function that is called. Random factories (`torch.rand`) get a rank's sizes here, and their numbers from the plan's draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from proctor.errors import MappingError, OracleError
from proctor.oracle.parallel import intercept
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.plans.mesh import Layout
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import FactoryRule

# Made of sizes alone, each element by itself (or drawn: the plan's draws say where it lies). The place of the first size.
_SIZED: Final = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), 0), "full": 0, "randint": -1,
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), 1),
}  # fmt: skip
# Made whole, of which a part is taken: elements depend on their place.
_PLACED: Final = frozenset({"arange", "linspace", "logspace", "eye"})
_FIRST: Final = {"linspace": 2, "logspace": 2, "eye": 0}  # the place of their first size

NAMES: Final = (*_SIZED, *sorted(_PLACED))


class Factories(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """The factories of one model on one rank.

    Args:
        plan: its rules.
        comm: where this rank is.
    """

    def __init__(self, plan: Plan, comm: Comm) -> None:
        super().__init__()
        self._rules, self._comm = plan.factories, comm
        self._paths: list[str] = []

    def concerns(self, path: str) -> bool:
        """Whether a rule is about a module."""
        return any(compiled(rule.module).fullmatch(path) for rule in self._rules)

    def inside(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module's forward, with the tensors that it makes."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._paths.append(path)
            try:
                if len(self._paths) > 1:
                    return forward(*args, **kwargs)
                with self:
                    return forward(*args, **kwargs)
            finally:
                self._paths.pop()

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name not in _SIZED and name not in _PLACED) or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        path = self._paths[-1]
        try:
            return self._sized(name, path, func, args, kwargs) if name in _SIZED else self._placed(name, path, func, args, kwargs)
        except MappingError as error:
            raise OracleError(f"{path or 'the model'} makes a tensor by {name} ({intercept.user_line()}): {error.message}") from None

    def _rule(self, name: str, path: str, ndim: int) -> FactoryRule | None:
        return next((r for r in self._rules if compiled(r.module).fullmatch(path) and name in (r.names or (name,)) and r.ndim in (0, ndim)), None)

    def _sized(self, name: str, path: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = list(args), dict(kwargs)
        at = _SIZED[name] if _SIZED[name] >= 0 else next((i for i, a in enumerate(args) if isinstance(a, Sequence)), len(args))
        if "size" not in kwargs and at >= len(args):
            return func(*args, **kwargs)
        spread = "size" not in kwargs and not isinstance(args[at], Sequence)  # torch.zeros(2, 3)
        size = kwargs["size"] if "size" in kwargs else args[at:] if spread else args[at]
        rule = self._rule(name, path, len(size))
        if rule is None or rule.sizes == "part":
            return func(*args, **kwargs)
        mine = Box.of(tuple(int(n) for n in size), self._layout(rule), self._comm.mesh, self._comm.coords).local
        self._even(size, rule)
        if "size" in kwargs:
            kwargs["size"] = mine
        else:
            args[at:] = mine if spread else [mine, *args[at + 1 :]]
        return func(*args, **kwargs)

    def _placed(self, name: str, path: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        rule = self._rule(name, path, made.dim())
        if rule is None:
            return made
        layout, shape = self._layout(rule), list(made.shape)
        if rule.sizes == "part":
            for dim, cuts in layout.by_dim(made.dim()).items():
                shape[dim] *= math.prod(self._comm.mesh.size(cut.axis) for cut in cuts)
            made = self._longer(name, func, args, dict(kwargs), shape)
        self._even(shape, rule)
        box = Box.of(tuple(shape), layout, self._comm.mesh, self._comm.coords)
        for dim, held in enumerate(box.indices):
            if len(held) != shape[dim]:
                made = made.index_select(dim, torch.from_numpy(held).to(made.device))
        return made

    def _longer(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], shape: list[int]) -> torch.Tensor:
        """The same with the sizes of one device."""
        args = list(args)
        if name == "arange":
            given = {**dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args)), **kwargs}
            start, step = given.get("start", 0), given.get("step", 1)
            wanted = func(*args, **kwargs)
            exact = torch.float64 if wanted.is_floating_point() else torch.int64  # as torch counts: start + i * step, rounded once
            made: torch.Tensor = func(shape[0], dtype=exact, device=wanted.device) * step + start
            return made.to(wanted.dtype)
        keys = ("n", "m") if name == "eye" else ("steps",)
        for place, (key, size) in enumerate(zip(keys, shape), _FIRST[name]):
            if place < len(args):
                args[place] = size
            else:
                kwargs[key] = size
        longer: torch.Tensor = func(*args, **kwargs)
        return longer

    def _layout(self, rule: FactoryRule) -> Layout:
        return rule.rule.layout(self._comm.mesh)

    def _even(self, shape: Sequence[int], rule: FactoryRule) -> None:
        """Refuse a dimension that the axes do not divide: the shard would be no part that a neighbour expects."""
        for dim, cuts in self._layout(rule).by_dim(len(shape)).items():
            parts = math.prod(self._comm.mesh.size(cut.axis) for cut in cuts)
            if shape[dim] % parts:
                raise MappingError(f"dimension {dim} of {list(shape)} is not divisible by {parts}")
