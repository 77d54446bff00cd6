"""What a rank holds at a moment of a program, tensor by tensor, and which part of the whole tensor it is.

A shard is compared with the slice of the reference that it should be, on the rank: gathering costs more and hides which rank is wrong.
Where the place of a shard cannot be told (strided shards, partial sums) the whole tensor is gathered.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Array = npt.NDArray[Any]
KINDS: Final = ("output", "gradient", "clipped", "state", "parameter", "buffer", "evaluation")
_WRAPPED: Final = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


class Seen(msgspec.Struct, frozen=True):
    """One tensor of one rank.

    Attributes:
        kind: of `KINDS`.
        name: of the parameter or buffer, a state's key behind it; "" for outputs.
        values: as float64, or as integers; a view that the next step may change.
        index: the part of the whole tensor that it is, one entry a dimension; None for all of it.
        sharded: whether other ranks hold other parts.
    """

    kind: str
    name: str
    values: Array
    index: tuple[slice | Array, ...] | Array | None = None
    sharded: bool = False


def observe(moment: str, net: Any, opt: Any, seen: Any) -> Iterator[Seen]:
    """Every tensor that is compared at a moment.

    Args:
        moment: "backward", "clipped", "update" or "evaluation".
        net: the model, wrapped.
        opt: the optimizer.
        seen: rows and outputs of each microbatch.
    """
    for part, out in seen:
        kind = "evaluation" if moment == "evaluation" else "output"
        yield Seen(kind, "", _whole(out), part.numpy(), sharded=True)
    if type(net).__name__ == "FullyShardedDataParallel" and moment != "evaluation":
        from proctor.oracle.fuzz.running import flat

        yield from flat.observe(moment, net, opt)
    elif type(net).__name__ == "DeepSpeedEngine" and moment != "evaluation":
        from proctor.oracle.fuzz.running import engine

        yield from engine.observe(moment, net)
    elif moment in ("backward", "clipped"):
        for name, p in parameters(net):
            if p.grad is not None:
                yield _seen("gradient" if moment == "backward" else "clipped", name, p.grad, like=p)
    elif moment == "update":
        named = parameters(net)
        yield from _state(named, opt)
        tables = _tables(net)
        yield from (one for parts in tables.values() for one in parts)
        for name, p in named:
            if name not in tables:
                yield _seen("parameter", name, p.detach(), like=p)
    if moment == "update":
        for name, b in unwrapped(net).named_buffers():
            yield _seen("buffer", clean(name), b)


def unwrapped(net: Any) -> Any:
    """The model within wrappers that are modules of their own."""
    while type(net).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DistributedModelParallel", "DeepSpeedEngine"):
        net = net.module
    return net


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for part in _WRAPPED:
        name = name.replace(part, "")
    return name


def parameters(net: Any) -> list[tuple[str, Any]]:
    """Parameters by clean names."""
    found = ((clean(name), p) for name, p in unwrapped(net).named_parameters())
    return [(name, p) for name, p in found if type(p).__name__ != "TableBatchedEmbeddingSlice"]  # TorchRec's view of a part of a table


def _tables(net: Any) -> dict[str, list[Seen]]:
    """Name → this rank's parts of parameters that only the state dict shows as what they are (TorchRec's `ShardedTensor`s); none where the table is elsewhere."""
    if type(net).__name__ != "DistributedModelParallel":
        return {}
    found: dict[str, list[Seen]] = {}
    for name, value in net.state_dict().items():
        parts = found.setdefault(name, [])
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            parts.append(Seen("parameter", name, array_of(shard.tensor), place, sharded=True))
        if not hasattr(value, "local_shards"):
            parts.append(Seen("parameter", name, array_of(value)))
    return found


def own(net: Any) -> set[str] | None:
    """Names of parameters whose gradients a program can show, where it has not those of all (a stage of a pipeline, ZeRO the optimizer's alone); None for all."""
    if type(net).__name__ == "DeepSpeedEngine":
        from proctor.oracle.fuzz.running import engine

        return engine.reduced(net)
    return {name for name, _ in parameters(net)} if hasattr(net, "schedule") else None


def module_types(net: Any) -> dict[str, str]:
    """Name of a parameter or buffer → the class of the module that owns it."""
    inner = unwrapped(net)
    found = {}
    if type(net).__name__ == "FullyShardedDataParallel":
        from proctor.oracle.fuzz.running import flat

        found.update(flat.module_types(net, _class))
    for path, module in inner.named_modules():
        base = _class(module)
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[clean(f"{path}.{name}" if path else name)] = base
    return found


def _class(module: Any) -> str:
    return next((c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP")), "")


def _state(named: list[tuple[str, Any]], opt: Any) -> Iterator[Seen]:
    inner = getattr(opt, "optim", opt)
    if type(inner).__name__ == "LBFGS":
        return  # one flat vector of all parameters, in an order of its own
    names = {id(p): name for name, p in named}
    for p, state in inner.state.items():
        for key, value in sorted(state.items()):
            if id(p) in names and isinstance(value, torch.Tensor | int | float):
                yield _seen("state", f"{names[id(p)]}:{key}", value, like=p)


def _seen(kind: str, name: str, value: Any, like: Any = None) -> Seen:
    if not isinstance(value, torch.Tensor):
        return Seen(kind, name, np.asarray(float(value)))
    if getattr(like, "tensor_model_parallel", False) and value.shape == like.shape:
        return Seen(kind, name, array_of(value), _part(like), sharded=True)
    place = _place(value)
    if place is not None:
        return Seen(kind, name, array_of(value.to_local()), place, sharded=True)
    if like is not None and not isinstance(value, DTensor) and isinstance(like, DTensor) and value.ndim and value.shape == like.to_local().shape:
        return Seen(kind, name, array_of(value), _place(like), sharded=True)
    return Seen(kind, name, _whole(value), sharded=isinstance(value, DTensor))


def _place(value: Any) -> tuple[slice, ...] | None:
    """Where a DTensor's local part lies; None if it is no DTensor or the place cannot be told."""
    return _local(value.shape, value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _part(p: Any) -> tuple[slice, ...]:
    """Where the part of a parameter lies that Megatron's layers hold."""
    state = importlib.import_module("megatron.core.parallel_state")
    at = state.get_tensor_model_parallel_rank()
    return tuple(slice(at * n, (at + 1) * n) if d == p.partition_dim else slice(0, n) for d, n in enumerate(p.shape))


@lru_cache(4096)
def _local(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> tuple[slice, ...] | None:
    if any(isinstance(p, Partial) or (p.is_shard() and type(p) is not Shard) for p in placements):
        return None
    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))


def _whole(value: Any) -> Array:
    return array_of(value.full_tensor() if isinstance(value, DTensor) else value)


def array_of(value: Any) -> Array:
    """A tensor's values, as float64 or as integers."""
    value = value.detach()
    if value.dtype is torch.float64 and value.layout is torch.strided and value.device.type == "cpu":
        return value.numpy()  # type: ignore[no-any-return]
    if value.is_sparse:
        value = value.to_dense()
    if value.is_floating_point():
        value = value.to(torch.float64)
    elif value.dtype is torch.bool:  # two of them have no difference
        value = value.to(torch.uint8)
    return value.cpu().numpy()  # type: ignore[no-any-return]
