"""Where the draws of a model's forward lie, and what they are called.

A draw belongs to the innermost module that a `draw` rule of the plan matches; it is named "call/path#n": the how-manieth
forward of the model, the module's path, its n-th call in that forward; the ordinal counts draws within that. So names do not
depend on what other modules draw, nor on the order in which ranks compute. A checkpointed module that computes again in
backward gets the names of its first pass.
"""

from __future__ import annotations

from typing import Any

import torch

from proctor.errors import MappingError, OracleError
from proctor.oracle.parallel import intercept
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.streams import Ident, Stream
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import DrawRule


def rule_of(plan: Plan, path: str, ndim: int) -> DrawRule | None:
    """The first rule of a plan on what a module draws, of so many dimensions."""
    return next((r for r in plan.draws if compiled(r.module).fullmatch(path) and r.ndim in (0, ndim)), None)


class _Call:
    """One call of a module that draws: its path, its name, and how many draws it has made."""

    __slots__ = ("name", "ordinal", "path")

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name, self.ordinal = path, name, 0


class Placing:
    """The `Place` of a model's forward; one an instance of `run.Parallel`.

    Args:
        plan: its draw rules.
        comm: where this rank is.
        stream: that draws.
    """

    def __init__(self, plan: Plan, comm: Comm, stream: Stream) -> None:
        self.plan, self.comm, self.stream = plan, comm, stream
        self._calls: list[_Call] = []
        self._forward = -1
        self._seen: dict[str, int] = {}
        self._recomputed: int | None = None
        self._before: list[Any] = []
        self._boxes: dict[tuple[str, tuple[int, ...]], Box] = {}

    def __call__(self, tensor: torch.Tensor) -> tuple[Stream, Box, Ident]:
        """See `draws.Place`.

        Raises:
            OracleError: no rule says how the tensor lies.
        """
        if not self._calls:
            raise OracleError(
                f"random numbers are drawn ({intercept.user_line()}) and the plan does not say how they lie", hint="add [[draw]] with that module"
            )
        call = self._calls[-1]
        ident = Ident(call.name, call.ordinal)
        call.ordinal += 1
        return self.stream, self._box(call.path, tuple(tensor.shape)), ident

    def _box(self, path: str, shape: tuple[int, ...]) -> Box:
        key = (path, shape)
        if key not in self._boxes:
            rule = rule_of(self.plan, path, len(shape))
            if rule is None:
                raise OracleError(f"{path or 'the model'} draws a tensor {list(shape)} ({intercept.user_line()}), and no [[draw]] is about {len(shape)} dimensions")
            layout = rule.rule.layout(self.comm.mesh)
            try:
                self._boxes[key] = Box.folded(shape, rule.fold, layout, self.comm.mesh, self.comm.coords)
            except MappingError as error:
                raise OracleError(f"{path or 'the model'} draws ({intercept.user_line()}): {error.message}") from None
        return self._boxes[key]

    def enter_model(self) -> None:
        """Before the model's forward."""
        self._forward += 1
        self._seen.clear()
        if self._recomputed is not None:  # the last backward raised before its end
            self._recomputed = None
            self._before.clear()
            intercept.set_placing(None)
        self._before.append(intercept.placing())
        intercept.set_placing(self)

    def leave_model(self) -> None:
        """After it, also where it raised."""
        if self._before:
            intercept.set_placing(self._before.pop())
        if not self._before:
            self._calls.clear()

    def backward_of(self, forward: int) -> None:
        """A backward has begun; what computes again from here on belongs to that forward.

        Raises:
            OracleError: one backward goes through several forwards, so it is not known which one computes again.
        """
        if self._recomputed is None:
            self._before.append(intercept.placing())
            intercept.set_placing(self)
            self._recomputed = forward
            self._seen.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        elif self._recomputed != forward:
            self._recomputed = -1  # said when something is drawn, if it is

    def _end_of_backward(self) -> None:
        self._recomputed = None
        intercept.set_placing(self._before.pop() if self._before else None)

    @property
    def drawn(self) -> list[tuple[str, tuple[int, ...]]]:
        """Which modules have drawn, with the shapes of a rank; in order, each once."""
        return list(self._boxes)

    @property
    def forward(self) -> int:
        """Number of the latest forward, from 0."""
        return self._forward

    def enter(self, path: str) -> None:
        """Before a module that draws."""
        if self._recomputed == -1:
            raise OracleError("modules compute again in a backward of several forwards: their draws have no names", hint="call backward once for each forward")
        own = getattr(self.stream, "generator", torch.default_generator) is not torch.default_generator
        if self._recomputed is not None and own:
            raise OracleError(f"{path} computes again, and checkpointing restores torch's default generator only, not a thread's", hint='give rng="keyed"')
        forward = self._forward if self._recomputed is None else self._recomputed
        at = self._seen.get(path, 0)
        self._seen[path] = at + 1
        if self._recomputed is not None and at:
            raise OracleError(f"{path} computes again more than once in a backward: its draws have no names", hint="checkpoint it once, or leave out dropout there")
        self._calls.append(_Call(path, f"{forward}/{path}#{at}"))

    def leave(self) -> None:
        """After it."""
        if self._calls:
            self._calls.pop()
