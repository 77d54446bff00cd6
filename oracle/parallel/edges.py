"""Transitions as hooks of modules: the only hooks that a run has beside those of draws.

A hook sees what enters or leaves a module as the program passes it, and hands out the same with tensors in their new layout.
In the first forward it also compares what a rule says a tensor comes as with what the edge before left it as.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle._names import compiled
from proctor.oracle._rules import EdgeRule
from proctor.oracle.mesh import Layout
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.nested import changed
from proctor.oracle.parallel.transitions import Move

_LEFT: Final = "_proctor_left"  # on a tensor: the edge that left it as it lies


class Edge:
    """A rule on one module.

    Args:
        rule: of the plan.
        path: of the module.
        comm: ranks.
    """

    def __init__(self, rule: EdgeRule, path: str, comm: Comm) -> None:
        source, target, back, home = rule.layouts(comm.mesh)
        self.rule, self.name = rule, f"{rule.at} of {path or 'the model'}"
        self.move = Move((source, target), (back, home), comm)
        self.idle = self.move.idle
        self.slot = compiled(rule.slot)
        self.everywhere = rule.slot == ".*"
        # What the rule speaks of: of other axes it neither knows nor changes how the tensor lies.
        self.axes = {cut.axis for layout in (source, target, back, home) for cut in layout.cuts if comm.mesh.size(cut.axis) > 1}

    def carry(self, tensor: torch.Tensor, checking: bool) -> torch.Tensor:
        """The tensor in its new layout.

        Raises:
            OracleError: it does not come as the rule says; only while checking.
            MappingError: a dimension is not divisible.
        """
        if checking:
            self._compare(tensor)
        if self.idle:
            return tensor
        try:
            moved = self.move(tensor)
        except OracleError as error:
            raise OracleError(f"{self.name}: {error.message}", hint=error.hint) from None
        if checking and moved is not tensor:
            setattr(moved, _LEFT, self)
        return moved

    def _compare(self, tensor: torch.Tensor) -> None:
        left: Edge | None = getattr(tensor, _LEFT, None)
        if left is None:
            return
        there, here = (_cuts(layout, tensor.dim(), self.axes & left.axes) for layout in (left.move.target, self.move.source))
        if there != here:
            raise OracleError(
                f"{self.name} comes as ({self.move.source}), says the plan, and {left.name} leaves it as ({left.move.target})",
                hint="make `from` of the one the `to` of the other",
            )


def _cuts(layout: Layout, ndim: int, axes: set[str]) -> set[tuple[object, ...]]:
    return {
        (c.axis, c.strategy, 0 if c.reduction else c.dim % ndim if -ndim <= c.dim < ndim else c.dim, c.options)
        for c in layout.cuts
        if c.axis in axes
    }


class InputEdges:
    """Hook before a module: transitions of its arguments, and tokens of an embedding whose rows are cut."""

    def __init__(self, edges: Sequence[Edge], state: Any) -> None:
        self.edges, self.first, self.state = edges, edges[0], state

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments in their new layouts."""
        if not kwargs and len(args) == 1 and self.first.everywhere and isinstance(args[0], torch.Tensor):
            return (self.first.carry(args[0], self.state.checking),), kwargs
        return changed(args, self._change), changed(kwargs, self._change)

    def _change(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        for edge in self.edges:
            if edge.slot.fullmatch(path):
                return edge.carry(tensor, self.state.checking)
        return tensor


class OutputEdges:
    """Hook after a module: transitions of what it gives."""

    def __init__(self, edges: Sequence[Edge], state: Any) -> None:
        self.edges, self.first, self.state = edges, edges[0], state

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """The output in its new layout."""
        if self.first.everywhere and isinstance(output, torch.Tensor):
            return self.first.carry(output, self.state.checking)
        return changed(output, self._change)

    def _change(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        for edge in self.edges:
            if edge.slot.fullmatch(path):
                return edge.carry(tensor, self.state.checking)
        return tensor


class Lookup:
    """An embedding of which this rank holds some rows: tokens of other rows give zeros.

    Args:
        start: first row.
        count: rows.
    """

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count
        self._others: list[torch.Tensor] = []

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hook: tokens as rows of this rank."""
        tokens = args[0] - self.start
        self._others.append((tokens < 0) | (tokens >= self.count))
        return (tokens.clamp(0, self.count - 1), *args[1:])

    def after(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Hook: zeros for the others' tokens."""
        return output.masked_fill(self._others.pop().unsqueeze(-1), 0.0)


class After:
    """A parameter that is added once, when the addends have been summed: the bias of a row-parallel layer.

    While the module computes, a tensor of zeros stands in its place.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: list[torch.nn.Parameter] = []
        self._zeros: torch.nn.Parameter | None = None

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Hook: put zeros in its place."""
        own = module._parameters[self.name]
        assert own is not None
        self._own.append(own)
        if self._zeros is None or self._zeros.dtype != own.dtype:
            self._zeros = torch.nn.Parameter(torch.zeros_like(own), requires_grad=False)
        module._parameters[self.name] = self._zeros

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Hook, also where the module raised: give it back and add it."""
        own = self._own.pop()
        module._parameters[self.name] = own
        if not isinstance(output, torch.Tensor):
            return None
        return output + own
