"""One forward and backward by a plan, on threads of this process, beside the same on one device: the judge of what is derived.

Parameters are moved a little first (all that begin as zeros or ones would hide a bias that is added twice). The loss is the sum of the
mean squares of what the model gives, so all outputs count. Outputs and gradients must be those of one device up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.errors import OracleError
from proctor.oracle.parallel.crossing.edges import changed
from proctor.oracle.parallel.run import parallelize
from proctor.oracle.parallel.threads import run
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan

# A difference by this much of the largest number of a tensor, or of all gradients, is rounding; a mistake is as large as the tensor.
_OWN: Final = 2e-3
_ALL: Final = 1e-5
_MOVED: Final = 0.05
Drawn = list[tuple[str, tuple[int, ...]]]


class Batch(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: object) -> Batch:
        """From a tensor, a tuple of arguments, or a mapping of arguments by name."""
        if isinstance(given, Mapping):
            return cls((), {str(key): value for key, value in given.items()})
        return cls(tuple(given) if isinstance(given, tuple | list) else (given,), {})

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the places that rules call slots."""
        return {**slots(self.args), **slots(self.kwargs)}

    def taken(self, start: int, stop: int, places: Sequence[str]) -> Batch:
        """Some rows of the tensors at these places."""

        def rows(path: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start:stop] if path in places else tensor

        return Batch(changed(self.args, rows), changed(self.kwargs, rows))


class Step(NamedTuple):
    """What a forward and a backward gave.

    Args:
        outputs: by slot.
        gradients: of whole parameters, by name.
        drawn: modules that drew, with the shapes that they drew.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    drawn: Drawn


class Trial(NamedTuple):
    """A plan held against one device.

    Args:
        apart: what differs, or why it did not run; nothing where all is equal.
        reached: operations of the first rank's forward, and tensors that were equal: how far it came.
        ended: whether the step came to its end.
        drawn: as for `Step`.
    """

    apart: tuple[str, ...]
    reached: tuple[int, int]
    ended: bool
    drawn: Drawn


class Rehearsal:
    """A model and a batch.

    Args:
        model: for one device, with values, on the CPU; stays as it is.
        batch: what it is called with.
        mesh: of the plan.
    """

    def __init__(self, model: torch.nn.Module, batch: Batch, mesh: Mesh) -> None:
        self.model, self.batch, self.mesh = copy.deepcopy(model), batch, mesh
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    scale = max(float(parameter.detach().abs().mean()), 0.02) if parameter.numel() else 0.0
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_((_MOVED * scale * noise).to(parameter.dtype))
        self._alone: dict[tuple[object, ...], Step] = {}

    def alone(self, plan: Plan, *, train: bool) -> Step:
        """On one device; in training with the draws of the plan, so that both draw the same."""
        key = (train, tuple(plan.draws) if train else ())
        if key not in self._alone:
            model = self._copy(train)
            if train:
                parallelize(model, self._on(plan, ()), seed=0, check=False)
            self._alone[key] = _step(model, self.batch)
        return self._alone[key]

    def cut(self, plan: Plan, axes: Sequence[str], *, train: bool) -> Trial:
        """On as many threads as the axes have ranks; the other axes of the mesh have one."""
        wanted = self.alone(plan, train=train)
        rules = self._on(plan, axes)
        models = [self._copy(train) for _ in range(rules.mesh.world)]
        counter = _Counter()

        def one(rank: int) -> Step:
            parallelize(models[rank], rules, seed=0, check=False)
            return _step(models[rank], self.batch, counter if rank == 0 else None)

        try:
            found = run(one, rules.mesh.world)
        except Exception as error:  # noqa: BLE001  # a plan that is tried may break the model anywhere
            said = error.message if isinstance(error, OracleError) else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return Trial((said[:300],), (counter.operations, 0), False, [])
        worst = max((compared(wanted, step) for step in found), key=len)
        same = len(wanted.outputs) + len(wanted.gradients) - len(worst)
        return Trial(tuple(worst), (counter.operations, same), True, found[0].drawn)

    def _copy(self, train: bool) -> torch.nn.Module:
        return copy.deepcopy(self.model).train(train)

    def _on(self, plan: Plan, axes: Sequence[str]) -> Plan:
        sizes = tuple(size if axis in axes else 1 for axis, size in zip(self.mesh.axes, self.mesh.sizes))
        rules = plan.on(Mesh(self.mesh.axes, sizes))
        rules.shards.clear()  # torch's own, among processes only, and what it computes is the same
        return rules


def slots(value: Any) -> dict[str, torch.Tensor]:  # Any: whatever a module takes or gives
    """Its tensors, by place."""
    found: dict[str, torch.Tensor] = {}

    def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
        found[path] = tensor
        return tensor

    changed(value, note)
    return found


class _Counter(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        return out


def _step(model: torch.nn.Module, batch: Batch, counter: _Counter | None = None) -> Step:
    with counter if counter is not None else contextlib.nullcontext():
        outputs = slots(model(*batch.args, **batch.kwargs))
    counted = [t for t in outputs.values() if t.is_floating_point() and t.requires_grad]
    if not counted:
        raise OracleError(f"{type(model).__name__} gives no tensor with a gradient for this batch")
    torch.stack([t.float().square().mean() for t in counted]).sum().backward()
    running = getattr(model, "_proctor_parallel", None)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradients[name] = running.held.whole(name, gradient) if running is not None else gradient
    return Step({slot: t.detach() for slot, t in outputs.items()}, gradients, running.placing.drawn if running is not None else [])


def compared(wanted: Step, found: Step) -> list[str]:
    """What of the second is not what it is in the first, one line each, outputs first."""
    largest = max((float(g.abs().max()) for g in wanted.gradients.values() if g.numel()), default=0.0)
    lines = []
    for what, here, there, rest in (
        ("output", wanted.outputs, found.outputs, 0.0),
        ("gradient of", wanted.gradients, found.gradients, _ALL * largest),
    ):
        if here.keys() != there.keys():
            lines.append(f"{what}s are {', '.join(there)[:80]}, on one device {', '.join(here)[:80]}")
            continue
        for name, tensor in here.items():
            if apart := different(tensor, there[name], rest):
                lines.append(f"{what} {name or 'the model'} {apart}")
    return lines


def different(wanted: torch.Tensor, found: torch.Tensor, rest: float = 0.0) -> str:
    """In what two tensors differ by more than rounding; "" where they do not.

    Args:
        wanted: on one device.
        found: with the plan.
        rest: a difference that is always rounding.
    """
    if wanted.shape != found.shape:
        return f"is {list(found.shape)}, on one device {list(wanted.shape)}"
    if not wanted.is_floating_point() or not wanted.numel():
        return "" if torch.equal(wanted, found) else "differs"
    apart = (wanted.double() - found.double()).abs()
    same = (wanted == found) | (wanted.isnan() & found.isnan())  # infinities of a mask
    worst, own = float(apart.masked_fill(same, 0.0).max()), float(wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().max())
    if worst <= _OWN * own + rest:
        return ""
    return f"differs by {worst:.2g}, of numbers up to {own:.2g}"
