"""Parameters of one rank: cut from the whole model, put together again for its state dict, and their gradients held against other ranks'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel import norms
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.zero import axis_of, local
from proctor.oracle.plans.mesh import Cut, Layout
from proctor.oracle.plans.plan import Plan

_TOLERANCE: Final = 0.01  # of two numbers of a gradient: an addend that nobody reduced is as large as the gradient, rounding 1e-6 of it
_SHOWN: Final = 3


class Held:
    """What this rank holds of a model's parameters and buffers.

    Args:
        plan: says how they lie.
        comm: where this rank is.

    What a rank holds between uses (`boxes`) is less than what modules compute with (`running`) where the plan fully shards
    parameters along an axis (`between`); such a part is a DTensor to torch (`distributed`).
    """

    def __init__(self, plan: Plan, comm: Comm) -> None:
        self.plan, self.comm = plan, comm
        self.between = axis_of(plan, comm)
        self.distributed: Callable[[str, torch.Tensor], torch.Tensor] | None = None
        self.boxes: dict[str, Box] = {}
        self.running: dict[str, Box] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self._whole = True

    def layout(self, name: str) -> Layout:
        """Of a parameter or buffer; whole where no rule says anything."""
        return self.plan.param_layout(name) or Layout()

    def place(self, name: str, tensor: torch.Tensor) -> Box:
        """The box of a tensor between uses, remembered under its name."""
        layout, shape = self.layout(name), tuple(tensor.shape)
        try:
            box = self.running[name] = Box.of(shape, layout, self.comm.mesh, self.comm.coords)
            if self.between and isinstance(tensor, torch.nn.Parameter):
                layout = Layout((*layout.cuts, Cut(self.between)))
                box = Box.of(shape, layout, self.comm.mesh, self.comm.coords)
        except OracleError as error:
            raise OracleError(f"{name}: {error.message}", hint=error.hint) from None
        self.boxes[name] = box
        self.axes[name] = cut_axes(layout, self.comm)
        return box

    def cut(self, model: torch.nn.Module) -> None:
        """Replace the values of a model that every rank holds whole by what modules compute with; parameters stay the objects that they are."""
        done: dict[int, str] = {}
        for name, tensor in tensors_of(model):
            if id(tensor) in done:
                for table in (self.boxes, self.running, self.axes):
                    table[name] = table[done[id(tensor)]]  # type: ignore[assignment]
                continue
            done[id(tensor)] = name
            self.place(name, tensor)
            if self.axes[name]:
                tensor.data = part_of(tensor.data, self.running[name])

    def mark(self, model: torch.nn.Module, stages: str = "", others: Container[int] = ()) -> None:
        """Mark cut parameters for what looks at all of them (`norms`); of the stages of a pipeline, all, and those (by identity) that another stage counts."""
        for name, parameter in model.named_parameters():
            if (self.axes.get(name) or stages) and parameter.requires_grad:
                norms.mark(parameter, self.comm, self.axes.get(name, ()), stages, id(parameter) not in others)

    def whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, on every rank; a collective over the axes that cut it."""
        if not self.axes.get(name):
            return local
        box = self.boxes[name]
        out = torch.zeros(box.shape, dtype=local.dtype)
        out[np.ix_(*box.indices)] = local.detach().cpu()
        # As bytes: every element comes from one rank, and a sum with zeros keeps its bits, a minus zero's too.
        flat = out.view(-1).view(torch.uint8)
        flat = self.comm.all_reduce(flat, self.axes[name])
        return flat.view(local.dtype).view(box.shape).to(local.device)

    def gather(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Hook after `state_dict`: that of the unsharded model, on every rank."""
        for name in self.boxes if self._whole else ():
            if self.axes[name] and prefix + name in state:
                state[prefix + name] = self.whole(name, local(state[prefix + name]))

    @contextlib.contextmanager
    def as_it_lies(self) -> Iterator[None]:
        """State dicts hold what this rank holds, within."""
        self._whole = False
        try:
            yield
        finally:
            self._whole = True

    def scatter(self, module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Hook before `load_state_dict`: takes that of the unsharded model."""
        for name, box in self.boxes.items():
            value = state.get(prefix + name)
            if self.axes[name] and isinstance(value, torch.Tensor) and tuple(value.shape) == box.shape:
                part = part_of(value, box)
                if self.distributed is not None and box is not self.running[name]:
                    part = self.distributed(name, part)
                state[prefix + name] = part


def cut_axes(layout: Layout, comm: Comm) -> tuple[str, ...]:
    """Axes of more than one rank that cut a tensor."""
    mesh = comm.mesh
    names = {name for cut in layout.cuts if not cut.reduction for name in cut.axis.split("+")}
    return tuple(axis for axis, size in zip(mesh.axes, mesh.sizes) if axis in names and size > 1)


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The rank's part, in memory of its own."""
    out = whole
    for dim, held in enumerate(box.indices):
        if len(held) != whole.shape[dim] or not bool((np.diff(held) == 1).all()):
            out = out.index_select(dim, torch.from_numpy(held).to(whole.device))
    return out.clone() if out is whole else out.contiguous()


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names; one that is tied comes several times."""
    found: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    return found + list(model.named_buffers(remove_duplicate=False))


def shapes_of(model: torch.nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model)}


def compare_replicas(model: torch.nn.Module, held: Held, stages: str = "") -> None:
    """After the first backward: gradients of replicated parameters are equal on all ranks that hold them; a collective over every axis
    but that of the stages of a pipeline.

    A transition that is missing, or a pending gradient that the plan forgot, shows here before the first update.

    Raises:
        OracleError: on all ranks, with the parameters and the axis.
    """
    mesh = held.comm.mesh
    for axis in (a for a, size in zip(mesh.axes, mesh.sizes) if size > 1 and a != stages):
        names = [name for name, p in model.named_parameters() if p.requires_grad and axis not in held.axes.get(name, ())]
        if not names:
            continue
        mine = torch.tensor([_marks(model.get_parameter(name).grad) for name in names], dtype=torch.float64)
        parts = torch.stack(held.comm.all_gather(mine, (axis,)))
        apart = (parts - parts[0]).abs().amax((0, 2)) > _TOLERANCE * parts[..., 0].amax(0)
        if bad := [name for name, one in zip(names, apart.tolist()) if one]:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            norms = ", ".join(f"{n:.3g}" for n in parts[:, names.index(bad[0]), 0].tolist())
            raise OracleError(
                f"gradients of {', '.join(bad[:_SHOWN])}{more} differ between the ranks along {axis} (norms {norms})",
                hint=f'an addend that nobody reduces: [[pending]] axes = ["{axis}"], or grad_from = {{ {axis} = "partial" }} at an edge behind',
            )


def _marks(gradient: torch.Tensor | None) -> tuple[float, float]:
    if gradient is None or not gradient.numel():
        return 0.0, 0.0
    flat = local(gradient.detach()).reshape(-1).double()
    signs = torch.arange(flat.numel(), dtype=torch.float64).mul_(0.7).sin_()
    return float(flat.norm()), float(flat @ signs)
