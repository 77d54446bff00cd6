"""How far a program's own rounding carries: the same program, in which each operation's result is moved by up to one unit in the last place.

A program that is written down once is rounded in one way; its ranks round in another (parts of a sum, a cast before a layer, one call over all parameters). Which of two
nearly equal values is the largest, which expert a router chooses, what is left of terms that cancel: all of that may turn by one unit, and no tolerance
says by how much. So the program is asked: it runs in one process several times, and every operation's result (and, where the candidate
computes in a coarser type than the program, every operand) is moved by chance by up to one unit in the last place of the type that the candidate computes in. What such runs differ by is the program's own.
Source: Monte Carlo arithmetic (Parker 1997; Denis, de Oliveira Castro, Petit 2016, *Verificarlo*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_EXACT: Final = 64.0  # whole numbers up to here (counters, ones, masks) are the same in every type


class Rounded(TorchDispatchMode):  # type: ignore[misc]
    """While it is on, results of operations are moved.

    Parameters and batches are made without it, in whatever type they are drawn, and then moved by a unit of their own. An optimizer's step computes in the types of its own tensors; forward and backward passes and what is between (clipping) in the coarser one, if there is one.

    Args:
        unit: one unit in the last place of the type that the candidate computes in, relative; types that are coarser have their own.
        seed: of the chance.
    """

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self._unit, self._chance, self._steps, self._made = unit, torch.Generator().manual_seed(seed), 0, True
        self._hooks: list[Any] = []

    def through(self, names: dict[str, Any]) -> Iterator[Any]:
        """A program's moments; what is done with them is not moved.

        Args:
            names: of the program.
        """
        names["make"], names["batch"] = self._once(names["make"]), self._once(names["batch"])
        moments = names["train"](0, 1)
        while True:
            with self:
                moment = next(moments, None)
            if moment is None:
                return
            yield moment

    def _once(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            self._made = False
            try:
                result = make(*args)
                with torch.no_grad():
                    for t in result.parameters() if isinstance(result, torch.nn.Module) else _tensors(result):
                        self._move(t.detach(), _spacing(t))
            finally:
                self._made = True
            return result

        return made

    def __enter__(self) -> Any:
        self._hooks = [register_optimizer_step_pre_hook(self._begins), register_optimizer_step_post_hook(self._ends)]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def _begins(self, *_: Any) -> None:
        self._steps += 1

    def _ends(self, *_: Any) -> None:
        self._steps -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if not self._made or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)  # a view, or what is drawn
        unit = 0.0 if self._steps else self._unit
        written = [_given(args, kwargs, i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        given = list(_tensors((args, kwargs)))
        if unit:
            kept = {id(t) for t in _tensors(written)}
            args, kwargs = tree_map(lambda t: self._operand(t, unit) if isinstance(t, torch.Tensor) and id(t) not in kept else t, (args, kwargs))
        result = func(*args, **kwargs)
        if given:
            for t in _tensors(written if written else result):
                self._move(t, max(unit, _spacing(t)))
        return result

    def _operand(self, t: torch.Tensor, unit: float) -> torch.Tensor:
        if not _moves(t) or _spacing(t) >= unit:
            return t
        moved = t.detach().clone()
        self._move(moved, unit)
        return moved

    def _move(self, t: torch.Tensor, unit: float) -> None:
        if not _moves(t):
            return
        values = torch.view_as_real(t) if t.is_complex() else t
        by = torch.rand(values.shape, generator=self._chance, dtype=torch.float64).mul_(2 * unit).sub_(unit)
        exact = (values == values.round()) & (values.abs() <= _EXACT)
        values.copy_((values.double() * by.masked_fill_(exact, 0.0).add_(1.0)).to(values.dtype))


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor))


def _moves(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and (t.is_floating_point() or t.is_complex()) and t.numel() > 0 and t.device.type == "cpu" and t.dtype.itemsize > 1


def _spacing(t: torch.Tensor) -> float:
    """One unit in the last place, relative; 0 for what is no floating point."""
    return torch.finfo(t.dtype).eps if t.is_floating_point() or t.is_complex() else 0.0
