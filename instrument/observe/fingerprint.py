"""A tensor's content as a fingerprint, a norm and three flags, without touching the tensor.

Called by the state recorder for every parameter of every step, so the common case (a dense CPU tensor) dispatches no
torch op at all: addresses go to the native kernel in one call. The rest runs torch ops with grad, `__torch_function__`
and dispatch modes off. Nothing here draws random numbers, bumps a version counter or enters a graph.

The hash is `native/fingerprint.h`: of bits in logical order, keyed by global index, so that the parts of a tensor add
up to the whole (`merge`). CUDA and XPU tensors are hashed on their device with int64 ops and read back in one
synchronisation per call and device; never while a CUDA graph is being captured.

What has no readable memory (meta, fake, sparse, quantized, functorch-wrapped, freed by FSDP, an unknown subclass) is
UNHASHED. A DTensor is its local shard at index 0; use `fingerprint_shard` to place it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from proctor.native.twins import fingerprint as keys

if TYPE_CHECKING:
    from torch import Tensor, device, dtype



def _load_kernel() -> Any:  # the extension has no stub; it has all functions of `_fingerprint_py`
    if os.environ.get("PROCTOR_NATIVE") != "0":
        try:
            return importlib.import_module("proctor.native._native")
        except ImportError:
            pass  # not built here; `proctor doctor` says so
    return keys


_kernel: Final = _load_kernel()

ZERO: Final = keys.ZERO
NONFINITE: Final = keys.NONFINITE
CONSTANT: Final = keys.CONSTANT
UNHASHED: Final = 16

_CHUNK_WORDS: Final = 1 << 22  # 32 MiB an int64 temporary on the device, about five alive at once
_DEVICES: Final = ("cuda", "xpu")  # have int64 and float64 arithmetic


class Summary(NamedTuple):
    """What is kept of a tensor's content."""

    fp: int  # 64 bits; 0 when UNHASHED or empty
    norm: float  # Euclidean; NaN where not computed (float8, UNHASHED)
    flags: int  # `invariants.schema.StateFlag`


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
    with _no_torch_function():
        plain = _plain(local)
        if plain is None:
            return _UNREAD
        shape = tuple(plain.shape)
    if not len(shape) == len(global_shape) == len(offsets):
        raise ValueError(f"shard {shape}, whole {tuple(global_shape)} and offsets {tuple(offsets)} differ in rank")
    if any(o < 0 or o + n > g for n, g, o in zip(shape, global_shape, offsets)):
        raise ValueError(f"shard {shape} at {tuple(offsets)} is not inside {tuple(global_shape)}")
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * s for o, s in zip(offsets, strides))
    return _one(plain, _collapse(shape, strides), start)


def fingerprint_all(tensors: Iterable[Tensor]) -> list[Summary]:
    """Summarise many tensors, each as a whole of its own: one native call, one synchronisation per device."""
    with _no_torch_function():
        out: list[Summary] = []
        slots: list[int] = []
        columns: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        held: list[Tensor] = []  # must outlive the call
        remote: dict[device, list[tuple[int, Tensor]]] = {}
        for i, tensor in enumerate(tensors):
            out.append(_UNREAD)
            plain = _plain(tensor)
            if plain is None:
                continue
            if not plain.is_cpu:
                remote.setdefault(plain.device, []).append((i, plain))
                continue
            width, kind = _formats()[plain.dtype]
            if not _is_dense(plain):  # one copy at a time, never one of the whole model
                out[i] = _here(plain, [(plain.numel(), 1)], 0)
                continue
            held.append(plain)
            slots.append(i)
            for column, value in zip(columns, (plain.data_ptr(), plain.numel() * width, width, kind)):
                column.append(value)
        if slots:
            fps, norms, flags = _kernel.fingerprint_many(*columns)
            for i, *fields in zip(slots, fps.tolist(), norms.tolist(), flags.tolist()):
                out[i] = Summary(*fields)
        for there in remote.values():
            for (i, _), summary in zip(there, _read_back([_on_device(t, [(t.numel(), 1)], 0) for _, t in there])):
                out[i] = summary
        return out


# ---- what may be read ------------------------------------------------------------------------------------------------


def _no_torch_function() -> Any:  # torch is not a typed import
    import torch

    return torch._C.DisableTorchFunction()


@contextmanager
def _unseen() -> Iterator[None]:
    """Torch ops that no mode, hook or graph of the user's sees."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        yield


@functools.cache
def _formats() -> dict[dtype, tuple[int, int]]:
    """Bytes of an element and its kind, for each dtype that has whole bytes."""
    import torch

    known = {
        keys.FLOAT: {"float16": 2, "float32": 4, "float64": 8},
        keys.BFLOAT16: {"bfloat16": 2},
        keys.INT: {"int8": 1, "int16": 2, "int32": 4, "int64": 8},
        keys.UNSIGNED: {"bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8},
        keys.COMPLEX: {"complex64": 8, "complex128": 16},
        keys.RAW: {
            "complex32": 4,
            "float8_e4m3fn": 1,
            "float8_e4m3fnuz": 1,
            "float8_e5m2": 1,
            "float8_e5m2fnuz": 1,
            "float8_e8m0fnu": 1,
            "float4_e2m1fn_x2": 1,
        },
    }
    return {
        getattr(torch, name): (width, kind)
        for kind, names in known.items()
        for name, width in names.items()
        if hasattr(torch, name)
    }


def _plain(tensor: Tensor) -> Tensor | None:
    """The tensor whose memory holds the content; None where there is none to read."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        local = getattr(tensor, "_local_tensor", None)  # DTensor
        return _plain(local) if isinstance(local, torch.Tensor) else None
    if tensor.layout is not torch.strided or tensor.dtype not in _formats() or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    if not tensor.is_cpu and (tensor.device.type not in _DEVICES or _capturing(tensor)):
        return None
    if tensor.numel() == 0:
        return None if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) else tensor
    # FSDP frees storage under living views; their data_ptr is then 0 + offset, and reading it a segmentation fault.
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + extent) * tensor.itemsize
    return tensor if needed <= tensor.untyped_storage().nbytes() and tensor.data_ptr() else None


def _capturing(tensor: Tensor) -> bool:
    import torch

    return bool(tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _is_dense(tensor: Tensor) -> bool:
    """Memory holds the content's bits in logical order."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _dense(tensor: Tensor) -> Tensor:
    if _is_dense(tensor):
        return tensor
    with _unseen():
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


# ---- where it lies ---------------------------------------------------------------------------------------------------

Runs = list[tuple[int, int]]  # (size, stride in the whole) from the outermost dimension to the innermost


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> Runs:
    """Fuse the dimensions that lie in the whole as one; the innermost has stride 1 (of size 1 if need be)."""
    runs: Runs = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs if runs and runs[-1][1] == 1 else [*runs, (1, 1)]


def _rows(runs: Runs, start: int) -> Iterator[tuple[int, int, int]]:
    """(start, rows, row stride) in elements: the two innermost runs, once for each index of the others."""
    rows, row_stride = runs[-2] if len(runs) > 1 else (1, 0)
    for index in itertools.product(*(range(size) for size, _ in runs[:-2])):
        yield start + sum(i * s for i, (_, s) in zip(index, runs[:-2])), rows, row_stride


def _one(tensor: Tensor, runs: Runs | None, start: int) -> Summary:
    with _no_torch_function():
        plain = _plain(tensor)
        if plain is None:
            return _UNREAD
        runs = runs or [(plain.numel(), 1)]
        if not plain.is_cpu:
            return _read_back([_on_device(plain, runs, start)])[0]
        return _here(plain, runs, start)


def _here(plain: Tensor, runs: Runs, start: int) -> Summary:
    plain = _dense(plain)
    width, kind = _formats()[plain.dtype]
    words = max(1, width // 4)
    address, nbytes = plain.data_ptr(), plain.numel() * width
    pieces = list(_rows(runs, start)) if nbytes else [(start, 1, 0)]
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


# ---- on a device: the same with int64 ops, whose arithmetic wraps ----------------------------------------------------


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # int64 shifts copy the sign


def _block_keys(block: Tensor) -> Tensor:
    z = block + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


@functools.cache
def _lane_keys(where: device) -> Tensor:
    import torch

    return torch.tensor(keys.lane_keys().astype("int64").tolist(), device=where)


def _mixed(words: Tensor) -> Tensor:
    """The hash's x of each word."""
    import torch

    bits = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}[words.element_size()]
    w = words.to(torch.int64) & bits
    return (w ^ (w >> 16)) + keys.BIAS


def _hash_indexed(words_RW: Tensor, start: int, row_stride: int) -> Tensor:
    """Hash rows; W words a row. Each word's keys are made on their own, so any start and stride will do."""
    import torch

    rows, length = words_RW.shape
    where = words_RW.device
    row = torch.arange(rows, device=where).unsqueeze(1) * row_stride
    index = row + torch.arange(length, device=where) + _signed(start)
    return (_block_keys(_shift(index, 9)) * _lane_keys(where)[index & (keys.LANES - 1)] * _mixed(words_RW)).sum()


def _hash_blocks(words: Tensor, start: int) -> Tensor:
    """Hash words that begin a block, whole blocks only: block keys are made once a block."""
    import torch

    x = _mixed(words).view(-1, keys.LANES)
    block = torch.arange(x.shape[0], device=words.device) + (start >> 9)
    return ((x * _lane_keys(words.device)).sum(1) * _block_keys(block)).sum()


def _hash_words(words: Tensor, start: int, rows: int, row_stride: int) -> Tensor:
    import torch

    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if rows > 1:
        words_RW = words.view(rows, -1)
        step = max(1, _CHUNK_WORDS // words_RW.shape[1])
        for low in range(0, rows, step):
            total += _hash_indexed(words_RW[low : low + step], start + low * row_stride, row_stride)
        return total
    head = min(-start % keys.LANES, words.numel())
    tail = words.numel() - (words.numel() - head) % keys.LANES
    for low, high in ((0, head), (tail, words.numel())):
        if high > low:
            total += _hash_indexed(words[low:high].unsqueeze(0), start + low, 0)
    for low in range(head, tail, _CHUNK_WORDS):
        total += _hash_blocks(words[low : min(low + _CHUNK_WORDS, tail)], start + low)
    return total


def _on_device(tensor: Tensor, runs: Runs, start: int) -> Tensor:
    """Fingerprint, norm (bits of a float64) and flags as one int64 tensor on the tensor's device."""
    import torch

    with _unseen():
        if tensor.numel() == 0:
            return torch.tensor([0, 0, ZERO | CONSTANT], device=tensor.device)
        width, kind = _formats()[tensor.dtype]
        flat = _dense(tensor).detach().reshape(-1)
        numbers = torch.view_as_real(flat).view(-1) if kind == keys.COMPLEX else flat
        words = numbers.view({1: torch.uint8, 2: torch.int16}.get(width, torch.int32))
        per_elem = max(1, width // 4)
        pieces = list(_rows(runs, start))
        size = words.numel() // len(pieces)
        fp = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for k, (first, rows, stride) in enumerate(pieces):
            fp += _hash_words(words[k * size : (k + 1) * size], first * per_elem, rows, stride * per_elem)
        norm, flags = _summary_on_device(words.view(-1, per_elem), numbers, kind)
        return torch.stack([fp, norm.view(torch.int64), flags])


def _summary_on_device(words_EW: Tensor, numbers: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Norm and flags; E elements of W words."""
    import torch

    varies = torch.zeros((), dtype=torch.bool, device=words_EW.device)
    nonzero, nonfinite = varies.clone(), varies.clone()
    squares = torch.zeros((), dtype=torch.float64, device=words_EW.device)
    floating = kind in (keys.FLOAT, keys.BFLOAT16, keys.COMPLEX)
    for part in words_EW.split(_CHUNK_WORDS):
        varies |= (part != words_EW[0]).any()
        if not floating:
            nonzero |= (part != 0).any()
    for part in numbers.split(_CHUNK_WORDS) if kind != keys.RAW else ():
        squares += part.to(torch.float64).square().sum()
        if floating:
            nonzero |= (part != 0).any()
            nonfinite |= ~torch.isfinite(part).all()
    norm = squares.sqrt() if kind != keys.RAW else torch.full_like(squares, math.nan)
    return norm, ~nonzero * ZERO + ~varies * CONSTANT + nonfinite * NONFINITE


def _read_back(found: list[Tensor]) -> list[Summary]:
    """Bring the summaries of one device over in one copy."""
    import torch

    with _unseen():
        table = torch.stack(found).cpu()
        norms = table[:, 1].contiguous().view(torch.float64).tolist()
        fps, flags = table[:, 0].tolist(), table[:, 2].tolist()
    return [Summary(fp % (1 << 64), norm, flag) for fp, norm, flag in zip(fps, norms, flags)]
