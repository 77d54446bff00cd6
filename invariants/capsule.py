"""A capsule: what one rank needs to do one training step again, and what came of that step.

A folder `RUN/capsules/<hash of the key>-step<k>-rank<r>/` of two files:

* `capsule.json`: this module's `Capsule`; every tensor by fingerprint.
* `tensors.safetensors`: the tensors that are held by value, under the names that `capsule.json` gives them.

Nothing in it is code, and nothing names another file: a capsule from elsewhere is read as data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from proctor.errors import TraceError
from proctor.invariants.codec.collective import MAX_WORLD
from proctor.invariants.descriptor import opened
from proctor.invariants.files import UNREADABLE, read_file

CAPSULE_SCHEMA: Final = 1
FOLDER: Final = "capsules"
HEAD: Final = "capsule.json"
TENSORS: Final = "tensors.safetensors"

MAX_HEAD_BYTES: Final = 64 << 20
MAX_CAPSULES: Final = 10_000  # that `capsules_of` lists

Plain = None | bool | int | float | str


class Print(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's content: fingerprint, `schema.StateFlag`, and Euclidean norm where it is known."""

    fp: int
    flags: int
    norm: float | None = None

    def same(self, other: Print) -> bool:
        """Whether both are of the same bits."""
        return self.fp == other.fp and self.flags == other.flags


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor or plain value in a batch, an argument or a result."""

    place: str  # `0['input_ids']`
    dtype: str = ""  # "" for what is no tensor
    shape: tuple[int, ...] = ()
    device: str = ""
    content: Print | None = None
    key: str = ""  # in the file of tensors; "" when it is not held by value
    value: Plain = None
    note: str = ""  # why it is not held


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """An outermost module call, a loss function outside of any module, or the root of a backward."""

    what: str  # module, loss, backward
    name: str
    inputs: tuple[Seen, ...] = ()
    outputs: tuple[Seen, ...] = ()
    generators: tuple[Generator, ...] = ()


class Batch(msgspec.Struct, frozen=True):
    """What a DataLoader gave; `number` counts all batches of the process from 0."""

    number: int
    items: tuple[Seen, ...]


class Generator(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a random generator: `torch`, `cuda:0`, `python`, `numpy`."""

    name: str
    key: str
    plain: dict[str, Plain] = {}


class Variable(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter, buffer, gradient, or value of an optimizer's state."""

    role: str  # parameter, buffer, gradient, optimizer
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""
    before: Print | None = None  # at the step's first act
    after: Print | None = None  # after its last update; of a gradient: as that update saw it
    key: str = ""  # of the value before
    value: Plain = None  # of a plain value before
    optimizer: str = ""  # label of the optimizer whose state it is
    trains: bool = True  # requires_grad
    note: str = ""


class Group(msgspec.Struct, frozen=True):
    """Hyperparameters of a parameter group before the step."""

    optimizer: str
    kind: str  # class
    index: int
    values: dict[str, Plain | list[Plain]]


class Capsule(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank."""

    schema: int = CAPSULE_SCHEMA
    key: str  # what it was kept for
    step: int
    control: int | None = None  # the step that it was kept beside, to compare with
    program: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    environment: dict[str, str] = {}  # variables that change arithmetic
    rank: int = 0
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)] = 1
    coords: dict[str, int] = {}
    versions: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    written: str = ""  # UTC
    by_value: bool = False  # state before the step is held by value, all of it
    updates: int = 0  # optimizer steps in this step
    first_batch: int = 0  # batches that the process had loaded before its very first training act
    batches_before: int = 0  # … and before this step's
    batches: tuple[Batch, ...] = ()
    calls: tuple[Call, ...] = ()
    generators: tuple[Generator, ...] = ()
    state: tuple[Variable, ...] = ()
    groups: tuple[Group, ...] = ()
    absent: tuple[str, ...] = ()  # what is not in it, and why


class Blob(NamedTuple):
    """A tensor to write: its bytes are asked for when their turn comes."""

    key: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    nbytes: int
    content: Callable[[], memoryview]


def folder_name(key: str, step: int, rank: int) -> str:
    """Of a capsule; the key may be any text."""
    return f"{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:12]}-step{step}-rank{rank}"


_NAME: Final = re.compile(r"[0-9a-f]{12}-step\d+-rank\d+")


def capsules_of(run: Path) -> list[Path]:
    """Capsule folders of a run directory, by step and rank; what is half written is not among them."""
    try:
        found = [p for p in (run / FOLDER).iterdir() if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    except OSError:
        return []

    def order(path: Path) -> tuple[int, int, str]:
        key, step, rank = path.name.split("-")
        return int(step[4:]), int(rank[4:]), key

    return sorted(found, key=order)[:MAX_CAPSULES]


def siblings(path: Path, capsule: Capsule) -> dict[int, Path]:
    """Capsules of all ranks of the same key and step, this one among them."""
    prefix = folder_name(capsule.key, capsule.step, 0)[:-1]
    folders = {int(p.name[len(prefix) :]): p for p in path.parent.iterdir() if _NAME.fullmatch(p.name) and p.name.startswith(prefix)}
    folders[capsule.rank] = path
    return {rank: folders[rank] for rank in sorted(folders) if rank < capsule.world and (folders[rank] / HEAD).is_file()}


def read_capsule(path: Path) -> Capsule:
    """Read and check one capsule, without the content of its tensors.

    Raises:
        TraceError: it is missing, damaged, of a newer schema, or names a tensor that is not there.
    """
    head = path / HEAD
    try:
        blob = read_file(head, MAX_HEAD_BYTES)
    except OSError as e:
        raise TraceError(f"{path} is not a capsule: {e.strerror or e}", hint="proctor capsule list RUN") from None
    try:
        schema = msgspec.json.decode(blob, type=_Schema).schema
        if schema > CAPSULE_SCHEMA:
            raise TraceError(f"{head}: schema {schema}, this Proctor reads up to {CAPSULE_SCHEMA}", hint="update Proctor")
        capsule = msgspec.json.decode(blob, type=Capsule)
    except UNREADABLE as e:
        raise TraceError(f"{head}: {e}") from None
    there = tensor_table(path)
    for key, shape in _keys(capsule):
        if key not in there:
            raise TraceError(f"{path / TENSORS}: no tensor {key!r}, which {HEAD} names")
        if shape is not None and there[key][1] != shape:
            raise TraceError(f"{path / TENSORS}: {key!r} has shape {there[key][1]}, {HEAD} says {shape}")
    return capsule


class _Schema(msgspec.Struct):
    schema: int


def tensor_table(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor in a capsule's file, read from its header by the safetensors library.

    Raises:
        TraceError: the file is missing or not of that format.
    """
    from safetensors import SafetensorError, safe_open

    file = path / TENSORS
    if not file.is_file():
        raise TraceError(f"{file} is missing")
    try:
        with safe_open(file, framework="np") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
            return {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as e:
        raise TraceError(f"{file}: {e}") from None


def _keys(capsule: Capsule) -> list[tuple[str, tuple[int, ...] | None]]:
    """Names of tensors that a capsule needs, with the shape that it gives them."""
    seen = [s for b in capsule.batches for s in b.items]
    seen += [s for c in capsule.calls for s in (*c.inputs, *c.outputs)]
    generators = [*capsule.generators, *(g for c in capsule.calls for g in c.generators)]
    found: list[tuple[str, tuple[int, ...] | None]] = [(s.key, s.shape) for s in seen if s.key]
    found += [(v.key, v.shape) for v in capsule.state if v.key]
    return found + [(g.key, None) for g in generators]


def write_capsule(folder: Path, capsule: Capsule, blobs: Sequence[Blob]) -> int:
    """Write a capsule whole or not at all; returns its bytes. The content goes out without the GIL.

    Args:
        folder: its place, which must not exist.
        blobs: tensors, their names distinct.

    Raises:
        OSError: it cannot be written, or is there already; nothing of it is left.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(0o700)  # it may hold samples of the training data
    try:
        head = msgspec.json.format(msgspec.json.encode(capsule), indent=1)
        (temporary / HEAD).write_bytes(head)
        size = len(head) + write_tensors(temporary / TENSORS, blobs)
        temporary.rename(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    return size


def write_tensors(path: Path, blobs: Sequence[Blob]) -> int:
    """Write tensors in the safetensors layout, https://github.com/huggingface/safetensors#format; returns the file's bytes."""
    header: dict[str, object] = {}
    at = 0
    ordered = sorted(blobs, key=lambda b: -_width(b))  # so that every tensor is aligned
    for blob in ordered:
        header[blob.key] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [at, at + blob.nbytes]}
        at += blob.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as file:
        file.write(len(text).to_bytes(8, "little") + text, 0)
        begin = 8 + len(text)
        for blob in ordered:
            file.write(blob.content(), begin)
            begin += blob.nbytes
    return 8 + len(text) + at


def _width(blob: Blob) -> int:
    count = 1
    for n in blob.shape:
        count *= n
    return blob.nbytes // count if count else 0
