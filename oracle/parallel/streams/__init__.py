"""Streams of random numbers that know of no ranks: what a rank draws is its part of what one device would draw.

`keyed`: a value follows from its name and its index alone, in any order and at a cost of O(local); the default. `stock`:
exactly what plain torch draws on one CPU, with the generator's state afterwards; needs the calls in the order of one
device. Both fill a shard in place. Source: veScale §5, whose streams are those of a GPU and bound to the order of calls.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box

KINDS: Final = ("keyed", "stock")


class Ident(msgspec.Struct, frozen=True):
    """Which draw it is, whatever the order of calls.

    Args:
        name: of the parameter at initialisation, else "step/call/module path".
        ordinal: of the draw within that name, from 0.
    """

    name: str
    ordinal: int = 0


class Stream(Protocol):
    """What fills shards."""

    kind: str

    def fill(self, draw: Any, out: torch.Tensor, box: Box, args: tuple[Any, ...], ident: Ident) -> None:
        """Overwrite a shard with its part of a draw.

        Args:
            draw: an elementwise rule of `draws`.
            out: the shard, of shape `box.local`.
            box: where it lies in the whole.
            args: of the operation; those that are tensors are shards that lie as `out` does.
            ident: which draw it is; the stock stream goes by the order of calls instead.
        """
        ...

    def whole(self, draw: Any, shape: tuple[int, ...], dtype: torch.dtype, args: tuple[Any, ...], ident: Ident) -> torch.Tensor:
        """All of a draw, for operations whose parts depend on each other."""
        ...


def stream(kind: str, seed: int, generator: torch.Generator | None = None) -> Stream:
    """A stream by its name.

    Args:
        kind: "keyed" or "stock".
        seed: of the keyed stream, and of the generator that the stock stream makes where none is given.
        generator: of the stock stream; `torch.default_generator` continues the process's own.

    Raises:
        OracleError: there is no such stream.
    """
    from proctor.oracle.parallel.streams.keyed import Keyed
    from proctor.oracle.parallel.streams.stock import Stock

    if kind == "keyed":
        return Keyed(seed)
    if kind == "stock":
        return Stock(torch.Generator().manual_seed(seed) if generator is None else generator)
    raise OracleError(f"{kind[:40]!r} is no stream of random numbers", hint=f"give one of {', '.join(KINDS)}")
