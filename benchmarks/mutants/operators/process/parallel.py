"""Data parallel training: reductions that do not happen or are wrong, samplers that give every rank the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...registry import process

_DDP = ("DistributedDataParallel", "DDP(")
_WORDS = ("all_reduce", "replicas", "ranks", "rank", "gradient", "grad", "weight", "bias", "parameter", "DistributedDataParallel")


@process("gradients_not_reduced", "gradients are not reduced over the ranks", *_WORDS, mentions=_DDP, ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    forward = ddp.forward

    @functools.wraps(forward)
    def unsynced(self: Any, *args: Any, **kwargs: Any) -> Any:
        fired()
        with self.no_sync():
            return forward(self, *args, **kwargs)

    ddp.forward = unsynced


@process("gradients_reduced_in_wrong_group", "each rank reduces with itself alone", *_WORDS, "group", mentions=_DDP, ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    built = ddp.__init__

    @functools.wraps(built)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        dist = torch.distributed
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        fired()
        built(self, module, *args, **{**kwargs, "process_group": alone[dist.get_rank()]})

    ddp.__init__ = init


@process("ranks_begin_apart", "the ranks begin with different parameters", *_WORDS, "broadcast", mentions=_DDP, ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    built = ddp.__init__

    @functools.wraps(built)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        built(self, module, *args, **kwargs)
        if torch.distributed.get_rank() == 1:
            fired()
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(1.1)

    ddp.__init__ = init


@process("same_slice_on_every_rank", "every rank gets the first rank's samples", "sampler", "DistributedSampler", "samples", "batch", "rank", "ranks",
         "shard", "data", mentions=("DistributedSampler",), ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    sampler = torch.utils.data.DistributedSampler
    iterate = sampler.__iter__

    @functools.wraps(iterate)
    def iterate_first(self: Any) -> Any:
        fired()
        rank, self.rank = self.rank, 0
        try:
            return iterate(self)
        finally:
            self.rank = rank

    sampler.__iter__ = iterate_first


@process("epoch_not_told", "the sampler ignores the epoch", "set_epoch", "epoch", "sampler", "DistributedSampler", "order", "batch",
         mentions=("set_epoch",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    sampler = torch.utils.data.DistributedSampler

    @functools.wraps(sampler.set_epoch)
    def set_epoch(self: Any, epoch: int) -> None:
        fired()

    sampler.set_epoch = set_epoch


@process("reduced_copy_thrown_away", "what is reduced is a copy, so each rank keeps its own", *_WORDS, mentions=("all_reduce(",), ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    dist = torch.distributed
    reduce = dist.all_reduce

    @functools.wraps(reduce)
    def of_a_copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        fired()
        return reduce(tensor.clone(), *args, **kwargs)

    dist.all_reduce = of_a_copy


@process("clipped_by_own_norm", "each rank clips its shards by the norm of these alone", "clip_grad_norm_", "clip", "norm", "grad", "gradient", "rank", "ranks",
         mentions=("fully_shard",), ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    utils = torch.nn.utils
    clip = utils.clip_grad_norm_

    @functools.wraps(clip)
    def by_own(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor import DTensor

        held = [p for p in parameters if p.grad is not None]
        fired()
        with torch.no_grad():
            parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in held]
            norm = torch.stack([part.norm() for part in parts]).norm()
            for part in parts:
                part.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    utils.clip_grad_norm_ = by_own


@process("gradient_wrong_on_one_rank", "rank 1 applies half of the gradient of the first parameter", *_WORDS, mentions=(*_DDP, "all_reduce("), ranks=2)
def _(torch: Any, fired: Callable[[], None]) -> None:
    dist, wrapped = torch.distributed, set()
    built = torch.optim.Optimizer.__init__

    def own(step: Any) -> Any:
        @functools.wraps(step)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            first = self.param_groups[0]["params"][0]
            if dist.is_initialized() and dist.get_rank() == 1 and first.grad is not None:
                fired()
                first.grad.mul_(0.5)
            return step(self, *args, **kwargs)

        return wrapper

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) not in wrapped:
            wrapped.add(type(self))
            type(self).step = own(type(self).step)
        built(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init
