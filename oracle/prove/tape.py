"""What one rank did in one training step: its operations in order, on windows of storages.

A tensor is a *window* on a storage: offset, sizes, strides. So views need no operation of their own, and what is written
through one view is seen through all others, as in the program. Written by `recording/recorder.py`, read by `machine.py`.

A file of a rank is one JSON head and a block of bytes; no pickle. The numbers of a tape are the run's own: of floats only
those that a step begins with (leaves) and constants, of integers and booleans all, since which row a token looks
up or which experts it goes to decides what is computed at all.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from proctor.errors import OracleError

SCHEMA: Final = 2
MARK: Final = "proctor.mark"
READ: Final = "proctor.read"
COMPLEX: Final = "complex."  # what the name of an operator on pairs of reals begins with
ROOT: Final = "?root"  # and a number: what names of a module begin with that is called beside others
ABSENT: Final = "absent"  # detail of a number that is read on a fake process group, and that others would have had a part in
_MOST_BYTES: Final = 2 << 30
_MOST_ELEMENTS: Final = 1 << 28

Array = NDArray[Any]


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A strided view of a storage; offset and strides count elements. `kind`: "f" floats, "i" integers, "b" booleans."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str

    @property
    def numel(self) -> int:
        """How many elements it shows."""
        return math.prod(self.size)

    @property
    def end(self) -> int:
        """One more than the last element of the storage that it reaches."""
        return self.offset + _reach(self.size, self.stride)


@functools.lru_cache(1 << 14)
def _reach(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of a storage a window spans."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))


def contiguous(storage: int, size: tuple[int, ...], kind: str) -> Window:
    """A window on the whole of a storage."""
    stride, n = [], 1
    for s in reversed(size):
        stride.append(n)
        n *= s
    return Window(storage, 0, size, tuple(reversed(stride)), kind)


class Node(msgspec.Struct, array_like=True, gc=False):
    """One operation.

    Attributes:
        op: such as "aten.mm.default"; or one of ours: a mark, a literal, a number that the program read.
        args: positional arguments; a tensor is {"t": index into ins}, a complex one {"c": …}, a number that the program read earlier {"r": node, "v": value}.
        kwargs: the same by name.
        ins, outs: windows; an `outs` entry is None for a result that is no tensor.
        values: slot of `Tape.blocks` with the recorded results, by index of `outs`; -1 where they are to be computed.
        place: "file:line function" of the user's own innermost frame, "" where there is none.
        module: path of the module in whose forward, or whose backward, it ran.
        phase: "forward", "backward" or "update".
        ranks: of a collective, the group.
        detail: of a collective what its arguments do not tell (the reduction); of a mark what is marked.
        seq: autograd's number of the backward node that belongs to it, -1 none.
    """

    op: str
    args: list[Any] = []  # Any: as of the operator's schema
    kwargs: dict[str, Any] = {}
    ins: list[Window] = []
    outs: list[Window | None] = []
    values: list[int] = []
    place: str = ""
    module: str = ""
    phase: str = "forward"
    ranks: tuple[int, ...] = ()
    detail: str = ""
    seq: int = -1


class Leaf(msgspec.Struct, array_like=True):
    """A storage that was there before the step touched it: its whole content is block `block`, from node `since` on."""

    storage: int
    kind: str
    block: int
    since: int


class Held(msgspec.Struct, array_like=True):
    """A parameter of the program at the step's begin: its name, the window of the rank's part, how DTensor places it."""

    name: str
    window: Window
    placements: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


class Event(msgspec.Struct):
    """A collective before the step, on a fake process group: `given` to it, by index of the node's `ins`; `left` by it, by the number of a window's
    storage. `turn`: how many of its group came before it."""

    node: Node
    turn: int
    given: list[Array]
    left: list[tuple[int, Array]]


class Tape(msgspec.Struct):
    """One rank's step. `blocks`: numbers that nodes and leaves point to; `notes`: what could not be followed; `reads`: where
    the program read an integer or a truth value that it had computed from floats, and may have decided by it; `imagined`: nodes that
    computed integers from floats that other ranks would have sent, on a fake process group; `before`: collectives before the step, there;
    `relied`: (which of them, where its result was used); `sent`: (node, window that it wrote, block) of the integers that a collective left there."""

    rank: int
    world: int
    nodes: list[Node] = []
    leaves: list[Leaf] = []
    held: list[Held] = []
    notes: list[str] = []
    reads: list[str] = []
    imagined: list[int] = []
    relied: list[tuple[int, str]] = []
    sent: list[tuple[int, Window, int]] = []
    counted: list[tuple[int, str]] = []
    done: bool = False
    before: list[Any] = []  # Any: of `Event`, which stays in the process, or its children
    blocks: list[Any] = []  # Any: numpy arrays, which msgspec does not know


class _Block(msgspec.Struct, array_like=True):
    dtype: str
    count: int


class _Head(msgspec.Struct):
    schema: int
    tape: Tape
    blocks: list[_Block]


def collective(op: str) -> bool:
    """Whether an operation needs other ranks."""
    return op.startswith(("c10d.", "_c10d_functional.")) and "wait_tensor" not in op


def write(tape: Tape, path: Path) -> None:
    """Write a rank's file, as a whole or not at all."""
    arrays = [np.ascontiguousarray(block) for block in tape.blocks]
    head = _Head(SCHEMA, Tape(**{f: getattr(tape, f) for f in tape.__struct_fields__ if f not in ("blocks", "before")}), [_Block(a.dtype.str, a.size) for a in arrays])
    text = msgspec.json.encode(head)
    part = path.with_suffix(".part")
    with open(part, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            out.write(array.tobytes())
    part.replace(path)


def read(path: Path) -> Tape:
    """Read a rank's file.

    Raises:
        OracleError: it is damaged, of another schema, or too large.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OracleError(f"{path}: more than {_MOST_BYTES >> 30} GiB", hint="record a smaller model")
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        head = msgspec.json.decode(data[8 : 8 + size], type=_Head)
        if head.schema != SCHEMA:
            raise OracleError(f"{path}: schema {head.schema}, this Proctor reads {SCHEMA}")
        at, tape = 8 + size, head.tape
        for block in head.blocks:
            dtype = np.dtype(block.dtype)
            if dtype.kind not in "fibu" or block.count < 0:
                raise OracleError(f"{path}: a block of {block.dtype[:20]}")
            tape.blocks.append(np.frombuffer(data, dtype, block.count, at))
            at += block.count * dtype.itemsize
        if not _fits(tape):
            raise OracleError(f"{path}: a tensor lies outside of what a tape may hold")
        return tape
    except (OSError, msgspec.MsgspecError, ValueError, TypeError) as error:
        raise OracleError(f"{path}: is no recorded step: {str(error)[:200]}") from None


def _fits(tape: Tape) -> bool:
    """Whether all windows lie within storages of a size that can be."""
    windows = (w for node in tape.nodes for w in (*node.ins, *node.outs) if w is not None)
    for w in itertools.chain(windows, (held.window for held in tape.held), (w for _, w, _ in tape.sent)):
        if len(w.size) != len(w.stride) or w.kind not in ("f", "i", "b") or w.storage < 0 or not 0 <= w.offset <= _MOST_ELEMENTS or min(w.size, default=0) < 0:
            return False
        if w.numel > _MOST_ELEMENTS or (w.numel and (w.end > _MOST_ELEMENTS or w.offset + sum((n - 1) * min(s, 0) for n, s in zip(w.size, w.stride)) < 0)):
            return False
    return True


def live(tape: Tape) -> set[int]:
    """Nodes that something comes of: what is marked, what other ranks get, and what goes into that."""
    storages: set[int] = set()
    read: set[int] = set()
    found: set[int] = set()
    for at in range(len(tape.nodes) - 1, -1, -1):
        node = tape.nodes[at]
        if node.op == MARK or collective(node.op) or at in read or any(w is not None and w.storage in storages for w in node.outs):
            found.add(at)
            storages.update(w.storage for w in node.ins)
            read.update(numbers([node.args, node.kwargs]))
    return found


def last_uses(tape: Tape) -> dict[int, list[int]]:
    """Storages that no later node reads or writes, by node."""
    last: dict[int, int] = {}
    for at, node in enumerate(tape.nodes):
        for w in (*node.ins, *node.outs):
            if w is not None:
                last[w.storage] = at
    found: dict[int, list[int]] = {}
    for storage, at in last.items():
        found.setdefault(at, []).append(storage)
    return found


def numbers(value: Any) -> list[int]:
    """Nodes at which numbers were read that an operation takes."""
    if isinstance(value, dict):
        return [value["r"]] if "r" in value else [n for v in value.values() for n in numbers(v)]
    return [n for v in value for n in numbers(v)] if isinstance(value, list) else []
