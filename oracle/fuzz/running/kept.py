"""What a rank keeps between tasks, and how it gets out of a group in which a task was left undone.

A gloo group takes 7 ms and two threads, and the shape of what an operator returns 4 ms of DTensor's time for each new operator, shape and placement: both are made
once. Where some ranks of a world raised and others wait for them, all let go of their groups and meet in new ones: 0.03 s, where forked ranks take a
second each until they are as fast.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug

Group = Any  # `ProcessGroup`; built without distributed there is none
_groups: dict[str, Group] = {}
_UNKNOWN: Final = object()


def join(store: Path, rank: int, world: int, timeout_s: float) -> None:
    """Meet the other ranks.

    Args:
        store: a file that no other group has used.
        rank: of this process.
        world: number of ranks.
        timeout_s: of a collective.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))


def let_go() -> None:
    """Leave all groups at once: a rank that waits for this one is told that it is gone. Gloo has nothing that does so, so its connections are shut down."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if end.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        end.shutdown(socket.SHUT_RDWR)
    importlib.import_module("torch.distributed.distributed_c10d")._abort_process_group()
    _groups.clear()
    _forget_meshes()
    _forget_groups()


def _forget_meshes() -> None:
    """Empty what torch.distributed keeps of earlier calls: the meshes therein hold groups that are gone."""
    with suppress(AttributeError):
        debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed"):
            for value in list(vars(module).values()):
                inner = list(vars(value).values()) if isinstance(value, type) else []
                for one in (value, *inner):
                    if isinstance(one, functools._lru_cache_wrapper):
                        one.cache_clear()


def _forget_groups() -> None:
    """Take groups that are gone out of the globals in which libraries keep them (TorchRec its groups within a host)."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch":
            for attribute in [a for a, value in list(vars(module).items()) if isinstance(value, dist.ProcessGroup)]:
                setattr(module, attribute, None)


def keep_groups() -> None:
    """Give what asks for a process group of the same ranks again the one that there is; none is ever freed."""
    import torch.distributed.distributed_c10d as c10d

    make = getattr(c10d, "_new_group_with_tag", None)
    if make is None:
        return

    def kept(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = f"{ranks and list(ranks)} {args} {sorted(kwargs.items())}"
        if key not in _groups:
            _groups[key] = make(ranks, *args, **kwargs)
        return _groups[key]

    c10d._new_group_with_tag = kept


def keep_shapes() -> None:
    """Ask once what shape an operator returns: DTensor runs it on tensors without memory for each new placement, though no placement goes into that.

    What is kept holds for arguments of the same shapes, strides, types and devices and equal other arguments; what raises is asked again. All questions are asked in one
    mode of tensors without memory: a new one notes the stack, which takes as long as the question of a small operator.
    """
    with suppress(ImportError, AttributeError):
        prop: Any = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
        prop._propagate_tensor_meta_non_cached = _asked_once(prop._propagate_tensor_meta_non_cached)


def _asked_once(ask: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    found: dict[Any, Any] = {}
    without_memory = FakeTensorMode()

    def asked(propagator: Any, schema: Any) -> Any:
        try:
            key = (schema.op, _plain(schema.args_schema), _plain(schema.kwargs_schema))
            known = found.get(key, _UNKNOWN)
        except (TypeError, AttributeError):  # an argument that cannot be compared
            return ask(propagator, schema)
        if known is _UNKNOWN:
            with nullcontext() if detect_fake_mode() else without_memory:  # a compiler that traces has a mode of its own
                known = found[key] = ask(propagator, schema)
        return known

    return asked


def _plain(value: Any) -> Any:
    """An argument without placements; equal only to one of the same type (1, 1.0 and True are not)."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((name, _plain(one)) for name, one in value.items())
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor is no key")
    meta = getattr(value, "tensor_meta", None)
    if meta is not None:
        return "tensor", tuple(meta.shape), tuple(meta.stride), meta.dtype, value.mesh.device_type
    return type(value), value
