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
