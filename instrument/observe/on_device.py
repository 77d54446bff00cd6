"""The fingerprint of a tensor that lies on a device: the same hash with int64 operations, whose arithmetic wraps.

`fingerprint` calls `on_device` for each such tensor and `read_back` once for all of a device. Never while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from proctor.instrument.observe.content import (
    CONSTANT,
    NONFINITE,
    ZERO,
    Runs,
    Summary,
    dense,
    formats,
    rows_of,
    unseen,
)
from proctor.native.twins import fingerprint as keys

if TYPE_CHECKING:
    from torch import Tensor, device

_CHUNK_WORDS: Final = 1 << 22  # 32 MiB an int64 temporary on the device, about five alive at once


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


def on_device(tensor: Tensor, runs: Runs, start: int) -> Tensor:
    """Fingerprint, norm (bits of a float64) and flags as one int64 tensor on the tensor's device."""
    import torch

    with unseen():
        if tensor.numel() == 0:
            return torch.tensor([0, 0, ZERO | CONSTANT], device=tensor.device)
        width, kind = formats()[tensor.dtype]
        flat = dense(tensor).detach().reshape(-1)
        numbers = torch.view_as_real(flat).view(-1) if kind == keys.COMPLEX else flat
        words = numbers.view({1: torch.uint8, 2: torch.int16}.get(width, torch.int32))
        per_elem = max(1, width // 4)
        pieces = list(rows_of(runs, start))
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


def read_later(found: Tensor) -> Callable[[], Summary | None]:
    """Begin to bring a summary over without waiting for the device; the result is None until it is here."""
    import torch

    with unseen():
        here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        here.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(found.device))

    def result() -> Summary | None:
        return read_back([here])[0] if event.query() else None

    return result


def read_back(found: list[Tensor]) -> list[Summary]:
    """Bring the summaries of one device over in one copy."""
    import torch

    with unseen():
        table = torch.stack(found).cpu()
        norms = table[:, 1].contiguous().view(torch.float64).tolist()
        fps, flags = table[:, 0].tolist(), table[:, 2].tolist()
    return [Summary(fp % (1 << 64), norm, flag) for fp, norm, flag in zip(fps, norms, flags)]
