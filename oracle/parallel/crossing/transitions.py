"""A change of layout of a local tensor, and of its gradient: the only places where a run communicates.

What `DTensor.redistribute` does for a tensor that knows its placement, for plain tensors whose layouts the plan says. One
axis after the other: addends are reduced and cuts undone, the inner ones first; then the new cuts are made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from proctor.errors import MappingError
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.plans.mesh import Cut, Layout, Mesh


class Step(NamedTuple):
    """What happens along one axis.

    Args:
        source: how the tensor comes; None for whole.
        target: how it leaves; None for whole.
    """

    source: Cut | None
    target: Cut | None


def steps(source: Layout, target: Layout, mesh: Mesh) -> list[Step]:
    """Along which axes a tensor changes, in the order of work.

    Raises:
        MappingError: an outer cut changes while an inner one of the same dimension stays.
    """
    here, there = ({cut.axis: cut for cut in layout.cuts if mesh.size(cut.axis) > 1} for layout in (source, target))
    kept = {axis for axis in here if here[axis] == there.get(axis)}
    for layout in (source, target):
        for at, cut in enumerate(layout.cuts):
            inner = [c for c in layout.cuts[at + 1 :] if not c.reduction and c.dim == cut.dim and c.axis in kept]
            if cut.axis not in kept and not cut.reduction and inner and mesh.size(cut.axis) > 1:
                raise MappingError(f"{source} → {target}: {cut} changes while {inner[0]}, inside it, stays")
    found = [Step(here[axis], there.get(axis)) for axis in reversed(here) if axis not in kept]
    return found + [Step(None, there[axis]) for axis in there if axis not in here]


class Move:
    """A transition, ready to be carried out.

    Args:
        forward: layouts from and to.
        backward: of the gradient, from and to.
        comm: ranks.
        scale: the gradient's factor: 1/n where addends were averaged over n ranks.
    """

    def __init__(self, forward: tuple[Layout, Layout], backward: tuple[Layout, Layout], comm: Comm) -> None:
        self.comm = comm
        self.source, self.target = forward
        self.there = steps(*forward, comm.mesh)
        self.back = steps(*backward, comm.mesh)
        averaged = [s.source for s in self.there if s.source is not None and s.source.reduction == "avg"]
        self.scale = 1.0
        for cut in averaged:
            self.scale /= comm.mesh.size(cut.axis)
        self._alone = self._one_sum(self.there, self.back), self._one_sum(self.back, self.there)

    @staticmethod
    def _one_sum(steps: list[Step], others: list[Step]) -> tuple[str, ...] | None:
        """The axis of the one sum that is all there is to do."""
        one = steps[0] if len(steps) == 1 and not others else None
        return (one.source.axis,) if one is not None and one.source is not None and one.source.reduction == "sum" and one.target is None else None

    @property
    def idle(self) -> bool:
        """Whether nothing happens on this mesh."""
        return not (self.there or self.back)

    @property
    def one_sum(self) -> bool:
        """Whether all there is to do is one sum, of the tensor or of its gradient; that cannot fail."""
        return self._alone != (None, None)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in its new layout, differentiable."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return carry(tensor, self.there, self.comm)
        summed, back = self._alone
        if summed is not None:
            return summed_up(tensor, self.comm, summed)
        if back is not None:
            copied: torch.Tensor = _Copied.apply(tensor, (self.comm, back))
            return copied
        moved: torch.Tensor = _Moved.apply(tensor, self)
        return moved

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for a tensor that was made just now, that nobody else has and no gradient needs: its sum is made where it lies."""
        summed = self._alone[0]
        if summed is None or not tensor.requires_grad or not tensor.is_contiguous() or not torch.is_grad_enabled():
            return self(tensor)
        self.comm.add(tensor.detach(), summed)
        return tensor


def summed_up(tensor: torch.Tensor, comm: Comm, axes: tuple[str, ...]) -> torch.Tensor:
    """Addends become their sum; the gradient is everybody's.

    No function of autograd in Python: a clone is a node of torch's own, which costs half, and whose gradient does not depend on what it holds.
    """
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.add(total.detach() if total.requires_grad else total, axes)
    return total


class _Copied(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """The tensor itself; its gradients are addends. (A hook on a view is no cheaper, and is lost where the program writes into the view.)"""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, over: tuple[Comm, tuple[str, ...]]) -> torch.Tensor:
        ctx.over = over
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return summed_up(gradients[0], *ctx.over), None


class _Moved(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, move: Move) -> torch.Tensor:
        ctx.move = move
        return carry(tensor, move.there, move.comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        move: Move = ctx.move
        gradient = carry(gradients[0], move.back, move.comm)
        return (gradient * move.scale if move.scale != 1.0 else gradient), None


def carry(tensor: torch.Tensor, todo: list[Step], comm: Comm) -> torch.Tensor:
    """Carry steps out; the tensor itself when there are none."""
    for source, target in todo:
        if source is not None:
            tensor = _whole(tensor, source, comm)
        if target is not None:
            tensor = _part(tensor, target, comm)
    return tensor


def _whole(tensor: torch.Tensor, cut: Cut, comm: Comm) -> torch.Tensor:
    if reduction := cut.reduction:
        return comm.all_reduce(tensor.clone(), (cut.axis,), reduction)
    return joined(comm.all_gather(tensor, (cut.axis,)), cut, tensor.dim())


def joined(parts: list[torch.Tensor], cut: Cut, ndim: int) -> torch.Tensor:
    """Shards of equal shape along an axis as one tensor."""
    dim = cut.dim % ndim
    if cut.strategy == "chunk":
        return torch.cat(parts, dim)
    extent = sum(part.shape[dim] for part in parts)
    shape = list(parts[0].shape)
    shape[dim] = extent
    out = parts[0].new_empty(shape)
    for at, part in enumerate(parts):
        place = torch.cat([torch.arange(extent)[s] for s in cut.slices(extent, len(parts), at)])
        out.index_copy_(dim, place.to(out.device), part)
    return out


def _part(tensor: torch.Tensor, cut: Cut, comm: Comm) -> torch.Tensor:
    size, at = comm.mesh.size(cut.axis), comm.mesh.index(cut.axis, comm.coords)
    if cut.reduction == "avg":
        return tensor
    if cut.reduction:
        return tensor if at == 0 else torch.zeros_like(tensor)
    if not -tensor.dim() <= cut.dim < tensor.dim():
        raise MappingError(f"{cut}: a tensor {list(tensor.shape)} has no such dimension")
    dim = cut.dim % tensor.dim()
    extent = tensor.shape[dim]
    if extent % size:
        raise MappingError(f"{cut}: dimension {dim} of a tensor {list(tensor.shape)} is not divisible by {size}")
    slices = cut.slices(extent, size, at)
    if len(slices) == 1 and slices[0].step in (None, 1):
        return tensor.narrow(dim, slices[0].start, slices[0].stop - slices[0].start).contiguous()
    place = torch.cat([torch.arange(extent)[s] for s in slices])
    return tensor.index_select(dim, place.to(tensor.device))
