"""Parameters, their gradients and what optimizers keep of them, read when an optimizer uses them.

Main gradients are read when an optimizer is about to use them, and before they are clipped; parameters before the first
forward and when the next step uses them (an optimizer may gather them that late), its state when it has stepped.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from proctor.oracle.collect.edges.forced import Forced, Supplied
from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.collect.optimizer import settings
from proctor.oracle.collect.optimizer.flats import Flats, gradient_of
from proctor.oracle.collect.optimizer.shaken import shaken
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.replay.replayed import Replayed
from proctor.oracle.collect.tape import Tape
from proctor.oracle.numbers.tiles import reduction, tiles_of

SHORTER: Final = (torch.bfloat16, torch.float16)  # types in which an engine may hold what a trainer has in a longer one


def asked_for(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The function by which an optimizer that is called so asks for gradients; `None` without one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


class Optimizers:
    """The optimizers of a process.

    Args:
        models: have the parameters.
        progress: is told that one has stepped.
        tape: records.
        supplied: has gradients that take the place of the program's.
        replayed: has the state that optimizers begin with; `None` leaves theirs.
        noise: seed of the noise sample; `None` for none.
        rounded: parameters are recorded as engines hold them, too: of their sums nobody could tell.
    """

    def __init__(
        self, models: Models, progress: Progress, tape: Tape, supplied: Supplied, replayed: Replayed | None, noise: int | None, *, rounded: bool = False
    ) -> None:
        self._models, self._progress, self._tape = models, progress, tape
        self._supplied, self._replayed, self._noise, self._rounded = supplied, replayed, noise, rounded
        self._made: list[weakref.ref[Any]] = []
        self._flats = Flats(models, tape.info.notes)
        self._taken: set[str] = set()  # main gradients of this step
        self._sharded: set[str] = set()  # parameters that are DTensors
        self._after: set[str] = set()  # of these, what was recorded in this step already
        self._restores: list[Callable[[], None]] = []  # of what noise did to optimizers that step now
        self._versions: dict[int, int] = {}  # of parameters, when gradients were last computed

    def add(self, optimizer: Any) -> None:
        """An optimizer is made."""
        self._made.append(weakref.ref(optimizer))

    def adopt(self) -> list[Any]:
        """Take those that were made before; returns them."""
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        for optimizer in found:
            self.add(optimizer)
        return found

    def next_step(self) -> None:
        """Gradients and parameters are taken once a step."""
        self._taken, self._after = set(), set()

    def close(self) -> None:
        """Nothing more is read: let go of tensors."""
        self._flats.clear()

    # -- parameters -----------------------------------------------------------------------------------------

    def record_before(self) -> None:
        """Parameters as the first step finds them."""
        self._record_parameters("param", lambda _: True)
        for name, parameter in self._models.parameters() if self._rounded else ():
            summed = reduction(tiles_of(tuple(local_of(parameter.detach()).shape), "param_as")) > 1
            for other in SHORTER:
                if summed and parameter.is_floating_point() and parameter.dtype != other:
                    self._record(parameter.detach().to(other), "param_as", name, str(other).removeprefix("torch."))

    def record_after(self) -> None:
        """Parameters as the next step finds them; DTensors were recorded when their optimizer had stepped."""
        self._record_parameters("param_after", lambda n: n not in self._after and n not in self._sharded)

    def _record_parameters(self, kind: str, wanted: Callable[[str], bool]) -> None:
        for name, parameter in self._models.parameters():
            if hasattr(parameter, "placements"):
                self._sharded.add(name)
            if wanted(name):
                self._record(parameter, kind, name, "")

    def overwrite(self, parameters: Callable[[], None]) -> None:
        """Have the parameters overwritten, and then the copies that optimizers made of them.

        Args:
            parameters: does the former.
        """
        for optimizer in self._alive():
            self._flats.find(optimizer)
        parameters()
        self._flats.copy_parameters()

    # -- updates --------------------------------------------------------------------------------------------

    def before_update(self, optimizer: Any, *, asks: bool = False) -> None:
        """An optimizer is about to step; one that `asks` has its gradients computed within."""
        if not self._progress.recording() or not self._tape.running():
            return
        self._flats.find(optimizer)
        if self._replayed is not None and self._progress.step == 0:
            self._replayed.before_update(optimizer, self._models.names.parameters)
        for group in optimizer.param_groups:
            self._tape.info.groups.append(settings.group_of(self._progress.step, optimizer, group, self._held_by))
        if not asks:
            self.record_gradients(optimizer)
        if self._supplied.force is not None:
            self._force_gradients(optimizer, self._supplied.force)
        if self._noise is not None:
            self._restores.append(shaken(optimizer, self._noise))

    def asking(self, take: Callable[[Any], None]) -> Callable[[Any, Any, Any], Any]:
        """A hook before an optimizer's step, which has gradients taken when the step has asked for them.

        Args:
            take: gets the optimizer; never fails.
        """

        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            closure = asked_for(args, kwargs)
            if closure is None or self._progress.over:
                return None

            def asked() -> Any:
                loss = closure()
                if self._progress.recording():
                    take(optimizer)
                return loss

            return ((args[0], asked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": asked})

        return before

    def record_gradients(self, optimizer: Any) -> None:
        """Gradients as an optimizer takes them, the first of a step."""
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor in self._flats:
                    self._record_parts(tensor, tensor.grad, "main_grad", "")
                    continue
                name = self._models.names.parameters.get(id(tensor))
                if name is None or name in self._taken:
                    continue
                grad = gradient_of(tensor)
                if grad is not None:
                    self._taken.add(name)
                    self._record(grad, "main_grad", name, "")

    def _force_gradients(self, optimizer: Any, force: Forced) -> None:
        """Give the optimizer the reference's gradients, so that its update is judged alone."""
        step = self._progress.step
        with torch.no_grad():
            for tensor in (t for group in optimizer.param_groups for t in group["params"]):
                grad = gradient_of(tensor)
                if grad is None:
                    continue
                local = local_of(grad)
                name = self._models.names.parameters.get(id(tensor))
                if tensor in self._flats:
                    for span in self._flats.spans(tensor):
                        part = force.gradient(step, span.name)
                        if part is not None and part.numel() >= span.stop:
                            values = part[span.start : span.stop].to(device=local.device, dtype=local.dtype)
                            local.view(-1)[span.at : span.at + values.numel()] = values
                elif name is not None:
                    whole = force.gradient(step, name)
                    if whole is not None and whole.numel() == local.numel():
                        local.copy_(whole.view(local.shape))

    def after_update(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if not self._progress.recording() or not self._tape.running():
            return
        self._progress.stepped = True
        if self._restores:
            self._restores.pop()()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor in self._flats:
                    self._record_parts(tensor, tensor, "opt_state", "master")
                state = optimizer.state.get(tensor, {}) if hasattr(optimizer.state, "get") else {}
                name = self._models.names.parameters.get(id(tensor))
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != tensor.numel():
                        continue
                    if value.numel() == 1 and key == "step":
                        continue
                    if tensor in self._flats:
                        self._record_parts(tensor, value, "opt_state", str(key))
                    elif name is not None:
                        self._record(value, "opt_state", name, str(key))
                if name in self._sharded and name not in self._after:
                    self._after.add(name)
                    self._record(tensor, "param_after", name, "")

        self._record_frozen()

    def _record_frozen(self) -> None:
        """DTensors that no optimizer has, while they are cut: the next forward gathers them."""
        owned = {id(t) for o in self._alive() for group in o.param_groups for t in group["params"]}
        for name, parameter in self._models.parameters():
            if name in self._sharded and name not in self._after and hasattr(parameter, "placements") and id(parameter) not in owned:
                self._after.add(name)
                self._record(parameter, "param_after", name, "")

    def note_versions(self) -> None:
        """Gradients were computed: what changes parameters from now on is an update."""
        self._versions = {id(p): p._version for _, p in self._models.parameters()}

    def _moved(self) -> set[int]:
        """Parameters that have changed since `note_versions`."""
        return {id(p) for _, p in self._models.parameters() if p._version != self._versions.get(id(p), p._version)}

    def updated_by_hand(self) -> bool:
        """Whether parameters have moved since `note_versions` where there is no optimizer: that was the update; gradients that are still there are recorded."""
        if not self._moved() or not self._tape.running():
            return False
        if any(p in self._flats or id(p) in self._models.names.parameters for o in self._alive() for group in o.param_groups for p in group["params"]):
            return False
        self._progress.stepped = True
        for name, parameter in self._models.parameters():
            if parameter.grad is not None and name not in self._taken:
                self._taken.add(name)
                self._record(parameter.grad, "main_grad", name, "")
        return True

    def moved(self) -> list[Any]:
        """Optimizers of which a parameter has changed since `note_versions`."""
        moved = self._moved()
        return [o for o in self._alive() if any(id(p) in moved for group in o.param_groups for p in group["params"])] if moved else []

    # -- clipping -------------------------------------------------------------------------------------------

    def before_clipping(self, parameters: Any) -> None:
        """Gradients as they were: clipping hides a wrong scale."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        if not isinstance(tensors, list | tuple):
            return
        for tensor in tensors:
            name = self._models.names.parameters.get(id(tensor))
            grad = getattr(tensor, "grad", None)
            if name is not None and grad is not None and f"{name}/unclipped" not in self._taken:
                self._taken.add(f"{name}/unclipped")
                self._record(grad, "main_grad", name, "unclipped")

    def after_clipping(self, norm: torch.Tensor, args: Any, kwargs: Any) -> None:
        """`clip_grad_norm_` was called with these, and gave this norm."""
        value = float(self._tape.scalar("grad_norm", norm))
        self._tape.info.clips.append(settings.clip_of(self._progress.step, value, args, kwargs, self._held_by))

    # -- all of them ----------------------------------------------------------------------------------------

    def _alive(self) -> list[Any]:
        return [o for ref in self._made if (o := ref()) is not None]

    def _held_by(self, tensor: Any) -> Iterator[str]:
        """Parameters of which a tensor of an optimizer holds elements."""
        if tensor in self._flats:
            yield from (span.name for span in self._flats.spans(tensor))
        elif id(tensor) in self._models.names.parameters:
            yield self._models.names.parameters[id(tensor)]

    def _record(self, tensor: Any, kind: str, name: str, slot: str) -> None:
        self._tape.record(tensor, call=0, kind=kind, meta=self._models.owner(name), slot=slot)

    def _record_parts(self, tensor: Any, value: Any, kind: str, slot: str) -> None:
        if value is None:
            return
        for span, part in self._flats.parts(tensor, value):
            meta = self._models.owner(span.name)
            self._tape.record(part, call=0, kind=kind, meta=meta, slot=slot, span=(span.start, span.stop))
