"""Tapes of a function: once for each rank of a world that is not there, on torch's fake process group.

Collectives of a fake group move nothing, and need not: what they mean is computed later, for all ranks together. What a program
decides by received numbers is not what it would decide in earnest; such programs are recorded as commands, with real ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from proctor.errors import OracleError
from proctor.oracle.prove.tape import Tape
from proctor.oracle.torch_version import require_torch

Program = Callable[[], object]


def tape_of(program: Program, rank: int = 0, world: int = 1, earlier: Sequence[Tape] = ()) -> Tape:
    """Call a function that builds a model and trains one step of it, as one rank of a world.

    Args:
        program: without arguments; it asks `torch.distributed` who it is, where there are several ranks.
        rank, world: below world; 1 for no process group.
        earlier: tapes of ranks of lower numbers: what they broadcast before the step arrives.

    Raises:
        OracleError: it trains no torch module, or raises.
    """
    import torch

    from proctor.oracle.prove.recording.session import Session

    session = Session(rank, world, real=False)
    with joined(rank, world):
        state = torch.random.get_rng_state()
        session.begin()
        if world > 1:
            session.follow(earlier)
        try:
            program()
        except Exception as error:
            raise OracleError(f"rank {rank} of {world}: {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            session.finish()
            torch.random.set_rng_state(state)
    if not session.tape.done:
        raise OracleError(f"rank {rank} of {world}: the function trains no torch module")
    return session.tape


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world that is not there.

    Raises:
        OracleError: there is a process group, or this torch is too old.
    """
    import torch.distributed as dist

    if world == 1:
        yield
        return
    require_torch("oracle prove of several ranks")
    if dist.is_initialized():
        raise OracleError("a process group is there already", hint="call destroy_process_group() first")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    _forget_meshes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    undo = [_answering_ddp(), _cutting_alone()]
    try:
        yield
    finally:
        for one in undo:
            one()
        dist.destroy_process_group()
        _forget_meshes()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _forget_meshes() -> None:
    """DTensor keeps how it cut for the rank before this one, and would cut for this one alike."""
    import torch.distributed.tensor._redistribute as redistribute
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # of torch 2.10
    if clear is None:
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        clear = getattr(getattr(propagate, "cache", None), "cache_clear", None)
    if clear is not None:
        clear()
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        clear = getattr(getattr(redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _answering_ddp() -> Callable[[], None]:
    """DistributedDataParallel's reducer wants a result of its collective, which a fake group does not give: a hook of the same meaning does."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    def reduce(group: Any, bucket: Any) -> Any:
        import torch.distributed as dist

        whole = group if group is not None else dist.group.WORLD
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size(whole))
        dist.all_reduce(buffer, group=whole)
        future: Any = torch.futures.Future()
        future.set_result(buffer)
        return future

    reduce.__annotations__.clear()  # it is judged by them

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, reduce)

    DistributedDataParallel.__init__ = made

    def undo() -> None:
        DistributedDataParallel.__init__ = original

    return undo


def _cutting_alone() -> Callable[[], None]:
    """DTensor is distributed from rank 0; here every rank has the whole, made from the same seed, and cuts its own part."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    shard, replicate = Shard.__dict__.get("_shard_tensor"), Replicate.__dict__.get("_replicate_tensor")
    if shard is None or replicate is None:
        return lambda: None

    def cut(self: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
        return shard(self, tensor, mesh, mesh_dim, None)

    def whole(self: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
        return replicate(self, tensor, mesh, mesh_dim, None)

    Shard._shard_tensor, Replicate._replicate_tensor = cut, whole

    def undo() -> None:
        Shard._shard_tensor, Replicate._replicate_tensor = shard, replicate

    return undo
