"""Updates of the optimizer, as a library could break them: one rank skips, some steps are lost, decay moves what is frozen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...registry import process

_STEP = (".step(",)


def _around_step(torch: Any, around: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Call `around(optimizer, step)` in place of every optimizer's step; classes are wrapped once, when first built."""
    wrapped: set[type] = set()
    built = torch.optim.Optimizer.__init__

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        if cls not in wrapped:
            wrapped.add(cls)
            cls.step = _wrap(cls.step, around)
        built(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init


def _wrap(step: Any, around: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, lambda: step(self, *args, **kwargs))

    return wrapper


def _rank(torch: Any) -> int:
    dist = torch.distributed
    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0


@process("one_rank_skips", "rank 1 leaves its third update out", "step", "rank", "ranks", "replicas", "parameter", "weight", mentions=_STEP, ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    count = 0

    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        nonlocal count
        count += 1
        if count == 3 and _rank(torch) == 1:
            fired()
            return None
        return step()

    _around_step(torch, around)


@process("update_lost", "every third update is lost", "step", "update", "parameter", mentions=_STEP)
def _(torch: Any, fired: Callable[[], None]) -> None:
    count = 0

    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0:
            fired()
            return None
        return step()

    _around_step(torch, around)


@process("frozen_parameter_moves", "an update moves a parameter that the optimizer does not hold or that gets no gradient",
         "parameter", "weight", "bias", "step", "frozen", mentions=("requires_grad", "detach(", "freeze"))
def _(torch: Any, fired: Callable[[], None]) -> None:
    frozen: list[Any] = []
    init = torch.nn.Module.requires_grad_

    @functools.wraps(init)
    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        if not requires_grad:
            frozen.extend(self.parameters())
        return init(self, requires_grad)

    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        result = step()
        for parameter in frozen[:1]:
            fired()
            with torch.no_grad():
                parameter.mul_(1.01)
        return result

    torch.nn.Module.requires_grad_ = requires_grad_
    _around_step(torch, around)


@process("gradient_of_one_parameter_lost", "one parameter's gradient is lost before each update", "grad", "gradient", "parameter", "weight", "bias",
         mentions=_STEP)
def _(torch: Any, fired: Callable[[], None]) -> None:
    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        first = optimizer.param_groups[0]["params"][0]
        if first.grad is not None:
            fired()
            first.grad = None
        return step()

    _around_step(torch, around)


@process("gradient_scaled_by_ranks", "gradients are summed over ranks where they should be averaged", "grad", "gradient", "all_reduce",
         "DistributedDataParallel", mentions=("DistributedDataParallel", "DDP(", "fully_shard", "all_reduce("), ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        fired()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        return step()

    _around_step(torch, around)


@process("group_options_swapped", "weight decay acts where it is 0, and not where it is set", "weight_decay", "decay", "group", "param_groups",
         mentions=("weight_decay",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    add = torch.optim.Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: Any, group: Any) -> None:
        add(self, group)
        given = self.param_groups[-1]
        if "weight_decay" in given:
            fired()
            given["weight_decay"] = 0.0 if given["weight_decay"] else 0.1

    torch.optim.Optimizer.add_param_group = add_param_group


@process("resume_with_another_rate", "after a resume the learning rate is another one", "lr", "load_state_dict", "resume", mentions=("optimizer.load_state_dict",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for group in self.param_groups:
            fired()
            group["lr"] *= 10

    torch.optim.Optimizer.load_state_dict = load_state_dict


@process("one_rank_with_another_rate", "rank 1 has another learning rate", "lr", "learning rate", "rank", "ranks", "replicas", "parameter", "weight", "bias", mentions=_STEP, ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    def around(optimizer: Any, step: Callable[[], Any]) -> Any:
        if _rank(torch) != 1:
            return step()
        fired()
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= 1.5
        try:
            return step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate

    _around_step(torch, around)
