"""What a rank holds under FSDP1: its part of each unit's flat parameter, told apart by the parameters that lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch

from proctor.oracle.fuzz.running.observe import Array, Seen, array_of, clean


class Piece(msgspec.Struct, frozen=True):
    """A rank's part of one parameter.

    Attributes:
        name: of the parameter.
        tensor: that the optimizer holds: the parameter, or the flat one; None if this rank has no element.
        local: where it lies in that tensor; None for all of it.
        index: which elements of the parameter it is.
    """

    name: str
    tensor: Any
    local: slice | None
    index: tuple[Array, ...] | None

    def seen(self, kind: str, value: Any, key: str = "") -> Seen:
        """A value of the tensor's shape, or a number that holds for all of it."""
        name = f"{self.name}:{key}" if key else self.name
        if not isinstance(value, torch.Tensor):
            return Seen(kind, name, np.asarray(float(value)))
        if not value.ndim:
            return Seen(kind, name, array_of(value))
        part = array_of(value).reshape(-1)
        return Seen(kind, name, part if self.local is None else part[self.local], self.index, sharded=self.index is not None)


def pieces(net: Any) -> Iterator[Piece]:
    """All of a rank's parts."""
    for path, module in net.named_modules():
        handle = getattr(module, "_handle", None)
        if handle is None or type(module).__name__ != "FullyShardedDataParallel":
            continue
        flat = handle.flat_param
        begins = [0, *accumulate(flat._numels)]  # without original parameters nothing is padded between them
        for i, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
            name = clean(f"{path}.{fqn}" if path else fqn)
            if handle.uses_sharded_strategy:
                info = flat._shard_param_infos[i]
                if not info.in_shard:
                    yield Piece(name, None, None, (np.arange(0),) * len(shape))
                    continue
                local = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
                numbers = np.arange(info.intra_param_start_idx, info.intra_param_end_idx + 1)
            else:
                local, numbers = slice(begins[i], begins[i + 1]), np.arange(flat._numels[i])
            index = tuple(np.unravel_index(numbers, shape)) if len(shape) else None
            yield Piece(name, flat._params[i], None, index) if handle._use_orig_params else Piece(name, flat, local, index)


def observe(moment: str, net: Any, opt: Any) -> Iterator[Seen]:
    """Gradients, or parameters and the state of the optimizer."""
    for piece in pieces(net):
        if piece.tensor is None:  # other ranks have all of it
            if moment in ("backward", "clipped"):
                yield Seen("gradient" if moment == "backward" else "clipped", piece.name, np.zeros(0), piece.index, sharded=True)
            continue
        if moment in ("backward", "clipped"):
            if piece.tensor.grad is not None:
                yield piece.seen("gradient" if moment == "backward" else "clipped", piece.tensor.grad)
            continue
        for key, value in sorted(opt.state.get(piece.tensor, {}).items()):
            if isinstance(value, torch.Tensor | int | float):
                yield piece.seen("state", value, key)
        yield piece.seen("parameter", piece.tensor)


def module_types(net: Any, of: Callable[[Any], str]) -> dict[str, str]:
    """Name of a parameter → what `of` says of the module that owns it."""
    found = {}
    for path, module in net.named_modules():
        handle = getattr(module, "_handle", None)
        if handle is not None:
            for fqn, info in zip(handle.flat_param._fqns, handle.flat_param._param_infos, strict=True):
                found[clean(f"{path}.{fqn}" if path else fqn)] = of(info.module)
    return found
