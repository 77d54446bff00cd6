"""Bugs planted into DistributedDataParallel and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from benchmarks.fuzz_mutants import mutant

# DistributedDataParallel


def _ddp(change: Callable[[Any, dict[str, Any]], None], before: Callable[[Any], None] | None = None) -> None:
    """Do something before and after a DDP is made."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    plain = DDP.__init__

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if before is not None:
            before(module)
        plain(self, module, *args, **kwargs)
        change(self, kwargs)

    DDP.__init__ = init


def _hooks(net: Any, factor: float, only: Callable[[str], bool] = lambda _: True) -> None:
    for name, p in net.named_parameters():
        if p.requires_grad and only(name):
            p.register_hook(lambda g: g * factor)


def _under(switch: str, value: object) -> None:
    _ddp(lambda self, kwargs: _hooks(self, 1.01) if kwargs.get(switch, "") == value else None)


@mutant("world", "wrapper")
def ddp_sums_for_mean() -> None:
    _ddp(lambda self, _: _hooks(self, self.process_group.size()))


@mutant("world", "wrapper")
def ddp_drops_one_rank() -> None:
    _ddp(lambda self, _: _hooks(self, 0.0 if self.process_group.rank() == 1 else 1.0))


@mutant("world", "wrapper")
def ddp_takes_the_first_rank_alone() -> None:
    _ddp(lambda self, _: _hooks(self, 0.0 if self.process_group.rank() else self.process_group.size()))


@mutant("wrapper", "ddp")
def ddp_bucket_view_scales() -> None:
    _under("gradient_as_bucket_view", True)


@mutant("wrapper", "ddp")
def ddp_static_graph_scales() -> None:
    _under("static_graph", True)


@mutant("wrapper", "ddp")
def ddp_find_unused_scales() -> None:
    _under("find_unused_parameters", True)


@mutant("wrapper", "ddp")
def ddp_without_broadcast_scales() -> None:
    _under("broadcast_buffers", False)


@mutant("wrapper", "ddp")
def ddp_small_buckets_scale() -> None:
    _ddp(lambda self, kwargs: _hooks(self, 1.01) if kwargs.get("bucket_cap_mb", 25) < 1 else None)


@mutant("wrapper", module="LayerNorm")
def ddp_scales_a_norm() -> None:
    import torch.nn as nn

    _ddp(lambda self, _: [_hooks(m, 1.5) for m in self.modules() if isinstance(m, nn.LayerNorm)] and None)


@mutant("wrapper", "world", module="LayerNorm")
def ddp_does_not_reduce_a_norm() -> None:
    import torch.nn as nn

    def before(net: Any) -> None:
        net._ddp_params_and_buffers_to_ignore = [f"{path}.{n}" for path, m in net.named_modules() if isinstance(m, nn.LayerNorm) for n, _ in m.named_parameters()]

    _ddp(lambda *_: None, before)


@mutant("wrapper")
def ddp_trains_what_is_frozen() -> None:
    _ddp(lambda *_: None, lambda net: net.requires_grad_(True))


@mutant("wrapper", "world", "accumulate", "sync")
def ddp_no_sync_forgets_to_sync() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    @contextmanager
    def no_sync(self: Any) -> Any:
        self.require_backward_grad_sync = False
        yield  # and never again

    DDP.no_sync = no_sync


@mutant("wrapper", "accumulate", "sync")
def ddp_no_sync_scales() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    plain = DDP.no_sync

    @contextmanager
    def no_sync(self: Any) -> Any:
        with plain(self):
            yield
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(1.01)

    DDP.no_sync = no_sync


@mutant("wrapper", "world", "ddp_hook")
def ddp_hook_sums() -> None:
    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks as hooks

    def summed(group: Any, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])

    summed.__annotations__ = {}  # DDP looks at them, and ours are text
    hooks.register_ddp_comm_hook = lambda kind, model, state=None: model.register_comm_hook(state, summed)


# ZeroRedundancyOptimizer


def _zero(change: Callable[[Any], None]) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    plain = Zero.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = plain(self, *args, **kwargs)
        change(self)
        return done

    Zero.step = step


def _grow(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(1.001)


@mutant("wrapper", "world", kind="parameter")
def zero_does_not_broadcast() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    Zero._sync_params = lambda self: None


@mutant("wrapper", "scheduler", kind="parameter")
def zero_ignores_the_schedule() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    Zero._sync_param_groups = staticmethod(lambda source, target: None)


@mutant("wrapper", "zero_view", kind="parameter")
def zero_view_grows() -> None:
    _zero(lambda self: _grow(self) if self.parameters_as_bucket_view else None)


@mutant("wrapper", "optimizer", kind="state")
def zero_forgets_its_state() -> None:
    def forget(self: Any) -> None:
        for state in self.optim.state.values():
            for value in state.values():
                value.zero_()

    _zero(forget)


@mutant("wrapper", "world", kind="parameter")
def zero_parts_on_one_rank() -> None:
    _zero(lambda self: _grow(self) if self.rank == 1 else None)
