"""Pending gradients, reduced together: one buffer for each set of axes and dtype, one collective for all axes of the set.

When a backward ends, what it added to the gradients of pending parameters goes through one flat buffer each. Reducing over
dp and tp at once is one all-reduce over both (veScale §6.3, N-dimensional fusion). Gradients of earlier backwards are put
aside meanwhile, so they are not reduced twice. A parameter without a gradient on some rank counts as zero there; one
without any gradient on all ranks keeps none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from proctor.oracle.parallel.comm import Comm


class Pending(NamedTuple):
    """A parameter whose gradient waits for a reduction.

    Args:
        name: canonical.
        parameter: of this rank.
        axes: over which, in mesh order.
        reduce: "sum" or "avg".
        held: false for a stand-in of what other ranks hold, which adds nothing.
    """

    name: str
    parameter: torch.nn.Parameter
    axes: tuple[str, ...]
    reduce: str
    held: bool = True


class Buckets:
    """See the module.

    Args:
        pending: parameters, in an order that all ranks share.
        comm: ranks.
    """

    def __init__(self, pending: Iterable[Pending], comm: Comm) -> None:
        self.comm = comm
        self.groups: dict[tuple[tuple[str, ...], str, torch.dtype], list[torch.nn.Parameter]] = {}
        self._earlier: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._task = -1  # the backward at whose end these are reduced
        self._quiet = False
        pending = list(pending)
        self._stand_ins = {one.parameter for one in pending if not one.held}
        for one in pending:
            key = (one.axes, one.reduce, one.parameter.dtype)
            self.groups.setdefault(key, []).append(one.parameter)
            one.parameter.register_hook(lambda gradient: self.begin())

    def begin(self) -> None:
        """A backward is under way, in which gradients of these parameters may arrive."""
        # By the number of the backward: one that raised never came to its end.
        if self._quiet or self._task == (task := torch._C._current_graph_task_id()):
            return
        self._task = task
        self._earlier.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._reduce)
        # Of all of them, for one that gets nothing from this backward has been reduced already.
        for parameters in self.groups.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    self._earlier[parameter] = parameter.grad
                    parameter.grad = None

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is reduced within: gradients are computed that are not the script's yet."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _reduce(self) -> None:
        for (axes, reduce, _), parameters in self.groups.items():
            self._reduce_bucket(parameters, axes, reduce)
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier.clear()

    def _reduce_bucket(self, parameters: Sequence[torch.nn.Parameter], axes: tuple[str, ...], reduce: str) -> None:
        some = torch.tensor([p.grad is not None for p in parameters], dtype=parameters[0].dtype, device=parameters[0].device)
        parts = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in parameters]
        flat = self.comm.all_reduce(torch.cat([*parts, some]), axes, reduce)
        at = 0
        for parameter, present in zip(parameters, flat[-len(parameters) :].tolist()):
            if present and parameter not in self._stand_ins:
                new = flat[at : at + parameter.numel()].view(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = new.clone()
                else:
                    parameter.grad.copy_(new)
            at += parameter.numel()
