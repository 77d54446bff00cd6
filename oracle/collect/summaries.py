"""What is kept of a tensor where only statistics are asked for: sums over tiles, and five numbers of all its elements."""

from __future__ import annotations

from typing import Any, Final

import torch

from proctor.oracle.numbers.tiles import EXACT, QUANTUM, reduction, sketch, tiles_of

_WHOLE: Final = frozenset({"scalar", "score", "choice", "mask", "op", "logprob"})  # small, or asked for element by element
_LARGE: Final = 1 << 14  # elements of integers from which they are summed, too


def summarise(tensor: torch.Tensor, kind: str, *, positions: bool = False) -> tuple[torch.Tensor, dict[str, Any]]:
    """What is kept in a tensor's place, and the fields of its `Entry` that say so; the tensor itself and none where it is small.

    Args:
        tensor: of any shape and device.
        kind: as of `Entry`.
        positions: those of a sequence stay apart (`tiles_of`), and whole numbers of rows × positions, which are tokens, are kept.
    """
    tile = tiles_of(tuple(tensor.shape), kind, positions=positions)
    plain = tensor.dtype.is_complex or (not tensor.dtype.is_floating_point and (tensor.numel() < _LARGE or (positions and tensor.ndim == 2)))
    if kind in _WHOLE or plain or reduction(tile) == 1:
        return tensor, {}
    values = tensor.detach().to(torch.float64)
    flat, lost = values.reshape(-1), 0
    total, square = flat.sum(), flat.dot(flat)
    if not bool(torch.isfinite(total + square)):  # one element that is not finite makes both so
        flat = flat[torch.isfinite(flat)]
        lost, total, square = values.numel() - flat.numel(), flat.sum(), flat.dot(flat)
    low, high = torch.aminmax(flat) if flat.numel() else (total, total)
    numbers = [*torch.stack([total, square, low, high]).tolist(), float(lost)]
    if kind in EXACT:
        values = torch.round(values / QUANTUM) * QUANTUM
    of = str(tensor.dtype).removeprefix("torch.")
    return sketch(values, tile), {"tile": tile, "of": of, "stats": (float(tensor.numel()), *numbers)}
