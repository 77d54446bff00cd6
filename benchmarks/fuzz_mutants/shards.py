"""Bugs planted into FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.fuzz_mutants import mutant

# FSDP2


def _reduced(change: Callable[[list[Any]], list[Any]]) -> None:
    """Change gradients before they are reduced."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    reduce = group.foreach_reduce
    group.foreach_reduce = lambda params, grads, *args, **kwargs: reduce(params, change(grads), *args, **kwargs)


def _sharded(change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Do something to a module that was sharded, with the arguments."""
    import torch.distributed.fsdp as fsdp

    shard = fsdp.fully_shard

    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        made = shard(module, *args, **kwargs)
        for one in made if isinstance(made, list) else [made]:
            change(one, kwargs)
        return made

    fsdp.fully_shard = fully_shard


def _louder(module: Any, factor: float = 1.001) -> None:
    module.register_forward_hook(lambda _, __, out: out * factor)


@mutant("wrapper")
def fsdp_halves_gradients() -> None:
    _reduced(lambda grads: [g * 0.5 for g in grads])


@mutant("wrapper", "world")
def fsdp_drops_one_rank() -> None:
    import torch.distributed as dist

    _reduced(lambda grads: [g * (dist.get_rank() != 1) for g in grads])


@mutant("wrapper", "world")
def hsdp_replicas_do_not_reduce() -> None:
    from torch.distributed.fsdp import FSDPModule

    plain = FSDPModule.set_requires_all_reduce
    _sharded(lambda module, _: plain(module, False))


@mutant("wrapper", "world", kind="output")
def fsdp_loses_a_shard() -> None:
    import torch.distributed as dist

    _sharded(lambda module, _: [p.data.to_local().zero_() for p in module.parameters()] and None if dist.get_rank() == 1 else None)


@mutant("wrapper", "fsdp_reshard", kind="output")
def fsdp_reshard_is_louder() -> None:
    _sharded(lambda module, kwargs: _louder(module) if kwargs.get("reshard_after_forward") is False else None)


@mutant("wrapper", "fsdp_units", kind="output")
def fsdp_units_are_louder() -> None:
    from torch.distributed.fsdp import FSDPModule

    _sharded(lambda module, _: _louder(module) if any(isinstance(m, FSDPModule) for m in module.modules() if m is not module) else None)


@mutant("wrapper", "fsdp_offload", kind="output")
def fsdp_offload_is_louder() -> None:
    _sharded(lambda module, kwargs: _louder(module) if kwargs.get("offload_policy") is not None else None)


@mutant("wrapper", "fsdp_dim", kind="output")
def fsdp_other_dimension_is_louder() -> None:
    _sharded(lambda module, kwargs: _louder(module) if kwargs.get("shard_placement_fn") is not None else None)


@mutant("wrapper", "accumulate", "sync")
def fsdp_never_syncs_again() -> None:
    from torch.distributed.fsdp import FSDPModule

    plain = FSDPModule.set_requires_gradient_sync
    FSDPModule.set_requires_gradient_sync = lambda self, _, **kwargs: plain(self, False, **kwargs)


# tensor parallelism


@mutant("wrapper", "tp_style", "world", kind="output")
def rowwise_does_not_reduce() -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel

    RowwiseParallel._prepare_output_fn = staticmethod(lambda layouts, local, module, outputs, mesh: outputs.to_local())


@mutant("wrapper", "tp_style", "world", kind="output")
def rowwise_adds_its_bias_twice() -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel

    plain = RowwiseParallel._prepare_output_fn

    def output(layouts: Any, local: Any, module: Any, outputs: Any, mesh: Any) -> Any:
        made = plain(layouts, local, module, outputs, mesh)
        return made + module.bias.to_local() * (mesh.size() - 1) if getattr(module, "bias", None) is not None else made

    RowwiseParallel._prepare_output_fn = staticmethod(output)


def _partitioned(function: str, name: str) -> None:
    """A rank's part of a parameter is wrong."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import ColwiseParallel

    plain = getattr(ColwiseParallel, function)

    def partition(self: Any, path: str, module: Any, mesh: Any) -> None:
        plain(self, path, module, mesh)
        if dist.get_rank() == 1 and getattr(module, name, None) is not None:
            getattr(module, name).data.to_local().mul_(1.01)

    setattr(ColwiseParallel, function, partition)


@mutant("wrapper", "world", kind="output")
def columnwise_bias_is_off() -> None:
    _partitioned("_partition_linear_fn", "bias")


@mutant("wrapper", "world", kind="output")
def columnwise_weight_is_off() -> None:
    _partitioned("_partition_linear_fn", "weight")


@mutant("wrapper", "world", kind="output")
def embedding_is_off() -> None:
    _partitioned("_partition_embedding_fn", "weight")
