"""What a reference drew at random, and where a candidate's parts of it lie: what ranks are given with `--rng keyed` and `--rng stock`.

    DIR/draws/drawn.msgpack            of a reference: every draw inside a module; a candidate has a copy
    DIR/draws/rank<r>.msgpack          of a candidate: what the reference calls a rank's modules, and how their tensors are cut

A draw is called "step/module#call" and a number, as `parallel/streams.Ident`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file, replace_file

FOLDER: Final = "draws"
DRAWN: Final = "drawn.msgpack"
MAX_BYTES: Final = 1 << 30


class Drawn(msgspec.Struct, frozen=True):
    """One draw of a reference.

    Args:
        shape: of the tensor that is drawn.
        state: of torch's generator before it; b"" where values follow from names.
    """

    shape: tuple[int, ...]
    state: bytes = b""


class Extent(msgspec.Struct, frozen=True):
    """One dimension of a tensor that crosses a module's edge, of which a rank holds a part.

    Args:
        dim: of the tensor.
        whole: elements of the reference's.
        held: int64 indices of this rank's elements in it, as bytes.
    """

    dim: int
    whole: int
    held: bytes


class Lies(msgspec.Struct):
    """How a rank's tensors lie in the reference's.

    Attributes:
        names: the rank's modules as the reference calls them.
        calls: by "step/module" (the reference's name) which of its calls a rank's call is.
        extents: by "step/module" (the reference's name), in the order of the record.
    """

    names: dict[str, str] = {}
    calls: dict[str, dict[int, int]] = {}
    extents: dict[str, list[Extent]] = {}


Drawns = dict[str, Drawn]
_T = TypeVar("_T")


def key_of(name: str, ordinal: int) -> str:
    """Of a draw."""
    return f"{name}/{ordinal}"


def write(path: Path, what: Any) -> None:
    """Write draws, or how a rank's tensors lie; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.msgpack.encode(what))


def read(path: Path, kind: type[_T]) -> _T:
    """Read them.

    Raises:
        OracleError: the file is missing or damaged.
    """
    try:
        return msgspec.msgpack.decode(read_file(path, MAX_BYTES), type=kind)
    except (*UNREADABLE, msgspec.MsgspecError) as e:
        raise OracleError(f"{path}: {e}", hint="record the reference again") from None
