"""What a collective is given for each rank and what it gives from each: the pieces whose content can be told on both sides.

A copy is compared by its fingerprint, so the piece that arrives has that of the piece that was sent. A sum is compared by a
projection: the first elements of the tensor times fixed weights, in float64, beside the sum of their absolute values, by
which rounding is judged. Nothing is communicated, and nothing is read that is large or not in this machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

ALL: Final = -1  # from, or for, all ranks of the group
PROJECTED: Final = 512  # elements
_SUMMED: Final = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64"})
_SUMS: Final = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
_HALF: Final = 32  # bits of a weight

Get = Callable[[str], Any]


class Piece(NamedTuple):
    """A part of what one rank gives to, or gets from, a collective."""

    peer: int  # rank of the other side, ALL where it is every rank
    tensor: Any


def sums(name: str) -> bool:
    """Whether this collective gives sums rather than copies."""
    return name in _SUMS


def given(name: str, get: Get, ranks: tuple[int, ...], me: int, root: int | None, peer: int | None) -> list[Piece]:
    """What this rank gives, before the call; copies for all ranks are in the row of what is sent.

    Args:
        name: of the function of `torch.distributed`.
        get: arguments of the call by name.
        ranks: of the group; `me`, `root` and `peer` are some of them, `None` where the call has none.
    """
    if name in ("all_reduce", "reduce"):
        return _one(ALL, get("tensor"))
    if name == "reduce_scatter":
        return _each(ranks, get("input_list"))
    if name == "reduce_scatter_tensor":
        return _parts(ranks, get("input"))
    if name == "scatter" and root == me:
        return _each(ranks, get("scatter_list"))
    if name == "all_to_all":
        return _each(ranks, get("input_tensor_list"))
    if name == "all_to_all_single" and not get("input_split_sizes"):
        return _parts(ranks, get("input"))
    return []


def got(name: str, get: Get, ranks: tuple[int, ...], me: int, root: int | None, peer: int | None) -> list[Piece]:
    """What this rank holds after the call; arguments as for `given`."""
    if name == "all_reduce" or (name == "reduce" and root == me):
        return _one(ALL, get("tensor"))
    if name in ("reduce_scatter", "reduce_scatter_tensor"):
        return _one(ALL, get("output"))
    if name in ("broadcast", "scatter") and root is not None:
        return _one(root, get("tensor"))
    if name == "all_gather":
        return _each(ranks, get("tensor_list"))
    if name == "all_gather_into_tensor":
        return _parts(ranks, get("output_tensor"))
    if name == "gather" and root == me:
        return _each(ranks, get("gather_list"))
    if name == "all_to_all":
        return _each(ranks, get("output_tensor_list"))
    if name == "all_to_all_single" and not get("output_split_sizes"):
        return _parts(ranks, get("output"))
    if name == "recv" and peer is not None:
        return _one(peer, get("tensor"))
    return []


def _one(peer: int, tensor: Any) -> list[Piece]:
    return [Piece(peer, tensor)] if hasattr(tensor, "data_ptr") else []


def _each(ranks: tuple[int, ...], tensors: Any) -> list[Piece]:
    if not isinstance(tensors, list | tuple) or len(tensors) != len(ranks) or not all(hasattr(t, "data_ptr") for t in tensors):
        return []
    return [Piece(rank, tensor) for rank, tensor in zip(ranks, tensors)]


def _parts(ranks: tuple[int, ...], tensor: Any) -> list[Piece]:
    """Equal parts of a tensor in its order, one a rank."""
    if not hasattr(tensor, "data_ptr") or not tensor.is_contiguous() or tensor.numel() % len(ranks):
        return []
    size = tensor.numel() // len(ranks)
    flat = tensor.detach().view(-1)
    return [Piece(rank, flat[i * size : (i + 1) * size]) for i, rank in enumerate(ranks)]


def projection(tensor: Any) -> tuple[float, float] | None:
    """The first elements times fixed weights, and the sum of their absolute values; `None` for what has no exact sums."""
    import torch

    if str(tensor.dtype).removeprefix("torch.") not in _SUMMED:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        head = tensor.detach().reshape(-1)[:PROJECTED].double()
        return float(head @ _weights()[: len(head)]), float(head.abs().sum())


@lru_cache(maxsize=1)
def _weights() -> Any:
    """Numbers between -1 and 1 that are the same in every process, and draw from no generator."""
    import torch

    state, found = 1, []
    for _ in range(PROJECTED):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        found.append((state >> _HALF) / (1 << (_HALF - 1)) - 1)
    return torch.tensor(found, dtype=torch.float64)


def coalesced() -> bool:
    """Whether calls are collected now and made later, so that nothing has been given when they return."""
    import torch.distributed as dist

    return bool(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_coalesce_state", None))
