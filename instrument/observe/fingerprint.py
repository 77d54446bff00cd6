"""A tensor's content as a fingerprint, a norm and three flags, without touching the tensor.

Called by the state recorder for every parameter of every step, so the common case (a dense CPU tensor) dispatches no
torch op at all: addresses go to the native kernel in one call. The rest runs torch ops with grad, `__torch_function__`
and dispatch modes off. Nothing here draws random numbers, bumps a version counter or enters a graph.

The hash is `native/memory/fingerprint.h`: of bits in logical order, keyed by global index, so that the parts of a tensor add
up to the whole (`merge`). CUDA and XPU tensors are hashed on their device with int64 ops and read back in one
synchronisation per call and device; never while a CUDA graph is being captured.

What has no readable memory (meta, fake, sparse, quantized, functorch-wrapped, freed by FSDP, an unknown subclass) is
UNHASHED. A DTensor is its local shard at index 0; use `fingerprint_shard` to place it.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.observe.content import (
    UNHASHED,
    Runs,
    collapse,
    dense,
    formats,
    is_dense,
    no_torch_function,
    readable,
    reader,
    rows_of,
)
from proctor.instrument.observe.content import (
    Summary as Summary,
)
from proctor.instrument.observe.content import (
    unseen as unseen,
)
from proctor.instrument.observe.on_device import on_device, read_back, read_later
from proctor.native.twins import fingerprint as keys

if TYPE_CHECKING:
    from torch import Tensor, device


def _load_kernel() -> Any:  # the extension has no stub; it has all functions of `_fingerprint_py`
    if os.environ.get("PROCTOR_NATIVE") != "0":
        try:
            return importlib.import_module("proctor.native._native")
        except ImportError:
            pass  # not built here; `proctor doctor` says so
    return keys


_kernel: Final = _load_kernel()


_SPOTS: Final = 16  # as in native/memory/tensors.cpp
_FOLD: Final = 0x9E3779B97F4A7C15
_UNREAD: Final = Summary(0, math.nan, UNHASHED)


def merge(parts: Iterable[int]) -> int:
    """Return the fingerprint of the whole from the fingerprints of a partition of it, in any order."""
    return sum(parts) % (1 << 64)


def fingerprint(
    tensor: Tensor,
    start: int = 0,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> Summary:
    """Summarise one tensor.

    Args:
        tensor: any tensor.
        start: index of its first element in the flattened whole that it is a part of.
        global_shape, offsets: instead of `start`, where it lies in an N-d whole (`fingerprint_shard`).
    """
    if global_shape is not None:
        return fingerprint_shard(tensor, global_shape, offsets or [0] * len(global_shape))
    return _one(tensor, None, start)


def fingerprint_shard(local: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> Summary:
    """Summarise a rectangular shard at its place: the `fp` of shards that tile the whole add up to the whole's.

    Args:
        local: the shard (a DTensor stands for its local tensor).
        global_shape: shape of the whole.
        offsets: index in the whole of the shard's first element.
    """
    with no_torch_function():
        plain = readable(local)
        if plain is None:
            return _UNREAD
        shape = tuple(plain.shape)
    if not len(shape) == len(global_shape) == len(offsets):
        raise ValueError(f"shard {shape}, whole {tuple(global_shape)} and offsets {tuple(offsets)} differ in rank")
    if any(o < 0 or o + n > g for n, g, o in zip(shape, global_shape, offsets)):
        raise ValueError(f"shard {shape} at {tuple(offsets)} is not inside {tuple(global_shape)}")
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * s for o, s in zip(offsets, strides))
    return _one(plain, collapse(shape, strides), start)


def fingerprint_all(tensors: Iterable[Tensor]) -> list[Summary]:
    """Summarise many tensors, each as a whole of its own: one native call for those that are plain, one synchronisation per device."""
    with no_torch_function():
        given = tensors if isinstance(tensors, list) else list(tensors)
        out: list[Summary] = reader().summaries(given)
        if None not in out:
            return out
        remote: dict[device, list[tuple[int, Tensor]]] = {}
        for i, tensor in enumerate(given):
            if out[i] is not None:
                continue
            plain = readable(tensor)
            if plain is None:
                out[i] = _UNREAD
            elif plain.is_cpu:  # one copy at a time, never one of the whole model
                out[i] = _here(plain, [(plain.numel(), 1)], 0)
            else:
                remote.setdefault(plain.device, []).append((i, plain))
        for there in remote.values():
            for (i, _), summary in zip(there, read_back([on_device(t, [(t.numel(), 1)], 0) for _, t in there])):
                out[i] = summary
        return out


def fingerprint_parts(parts: Iterable[tuple[Tensor, int, int]]) -> list[Summary]:
    """Summarise pieces of tensors, each as a whole of its own: one native call.

    Args:
        parts: tensor, first element and number of elements in memory order; of a tensor that is not dense, or not on the host, all of it
            is read whatever the piece.
    """
    with no_torch_function():
        out: list[Summary] = []
        slots: list[int] = []
        columns: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        held: list[Tensor] = []  # must outlive the call
        for i, (tensor, begin, count) in enumerate(parts):
            plain = readable(tensor)
            if plain is None:
                out.append(_UNREAD)
            elif not plain.is_cpu or not is_dense(plain):
                out.append(_one(plain, None, 0))
            else:
                out.append(_UNREAD)
                width, kind = formats()[plain.dtype]
                held.append(plain)
                slots.append(i)
                for column, value in zip(columns, (plain.data_ptr() + begin * width, count * width, width, kind)):
                    column.append(value)
        if slots:
            fps, norms, flags = _kernel.fingerprint_many(*columns)
            for i, *fields in zip(slots, fps.tolist(), norms.tolist(), flags.tolist()):
                out[i] = Summary(*fields)
        return out


def look_at(tensor: Tensor, size: int) -> int | None:
    """A hash of `size` bytes at each of sixteen places, evenly spread, of a dense tensor on the host that has as many; None of any other."""
    with no_torch_function():
        spots: int | None = reader().spots(tensor, size)
        if spots is not None:
            return spots
        plain = readable(tensor) if tensor.is_cpu else None
        if plain is None or not is_dense(plain):
            return None
        start, last = plain.data_ptr(), plain.numel() * plain.itemsize - size
    if last < 0:
        return None
    folded = 0
    for i in range(_SPOTS):
        folded = (folded * _FOLD + _kernel.fingerprint_buffer(start + last * i // (_SPOTS - 1), size, 1, keys.RAW, summary=False)[0]) % (1 << 64)
    return folded


def glance_at(tensor: Tensor) -> Callable[[], Summary | None]:
    """Summarise a tensor on a CUDA device without waiting for it: the result is None until the device has done it."""
    with no_torch_function():
        plain = readable(tensor)
        if plain is None:
            return lambda: _UNREAD
        return read_later(on_device(plain, [(plain.numel(), 1)], 0))


def _one(tensor: Tensor, runs: Runs | None, start: int) -> Summary:
    with no_torch_function():
        plain = readable(tensor)
        if plain is None:
            return _UNREAD
        runs = runs or [(plain.numel(), 1)]
        if not plain.is_cpu:
            return read_back([on_device(plain, runs, start)])[0]
        return _here(plain, runs, start)


def _here(plain: Tensor, runs: Runs, start: int) -> Summary:
    plain = dense(plain)
    width, kind = formats()[plain.dtype]
    words = max(1, width // 4)
    address, nbytes = plain.data_ptr(), plain.numel() * width
    pieces = list(rows_of(runs, start)) if nbytes else [(start, 1, 0)]
    size = nbytes // len(pieces)
    found = [
        _kernel.fingerprint_buffer(
            address + k * size, size, width, kind, first * words, rows, stride * words, len(pieces) == 1
        )
        for k, (first, rows, stride) in enumerate(pieces)
    ]
    if len(found) == 1:
        return Summary(*found[0])
    _, norm, flags = _kernel.fingerprint_buffer(address, nbytes, width, kind)
    return Summary(merge(fp for fp, _, _ in found), norm, flags)
