"""What a run of the oracle leaves on disk: tensors in safetensors files, one line of an index for each.

    DIR/oracle.json                                    the command, the world, the plan
    DIR/runs/<run>/rank<r>/index.jsonl                 one `Entry` a line, written after the file that holds its tensor
    DIR/runs/<run>/rank<r>/data-00000.safetensors      at most `SHARD_BYTES` of tensors, or one larger tensor
    DIR/runs/<run>/rank<r>/process.json                rank, world, notes; `done` once everything was recorded

Runs are `clean`, `eager` (without `torch.compile`, of a program that compiles), `again` (the reference a second time), `placed` (the
reference, with nothing dropped), `replayed` (the candidate with the reference's choices and masks), `noise-<k>` and, of programs with
8-bit casts, `strict-<k>`. Readers take these files as data from a
stranger: names are checked, sizes limited, nothing is unpickled. bfloat16 and the 8-bit floats, which numpy lacks, come
as unsigned integers of their width beside the name of their type.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.invariants.codec.collective import MAX_WORLD
from proctor.invariants.descriptor import opened
from proctor.invariants.files import UNREADABLE, read_file, replace_file
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.store.dry import without_dry_runs
from proctor.oracle.tensors import RAW, Clip, Draw, Entry, OptimizerGroup, Part

SCHEMA: Final = 1
CLEAN: Final = "clean"
AGAIN: Final = "again"
EAGER: Final = "eager"
PLACED: Final = "placed"
REPLAYED: Final = "replayed"
SHARD_BYTES: Final = 64 * 1024 * 1024
MAX_INDEX_BYTES: Final = 2 * 1024**3
MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
RUN_NAME: Final = re.compile(r"clean|again|eager|placed|replayed|forced|ops|(noise|strict)-\d{1,3}")

_DATA_NAME: Final = re.compile(r"data-\d{5}\.safetensors")
_RANK_NAME: Final = re.compile(r"rank(\d{1,7})")


class ProcessInfo(msgspec.Struct):
    """One rank of one run.

    Attributes:
        entries: lines of its index, -1 in older recordings.
        evaluated: by step how often each module was called without gradients, recorded or not.
    """

    rank: int
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
    pid: int = 0
    steps: int = 0
    done: bool = False
    open: bool = False  # it ended in the middle of a step
    coords: dict[str, int] = {}
    notes: list[str] = []
    fp8: list[str] = []
    plan: str = ""
    draws: list[Draw] = []
    parts: list[Part] = []
    groups: list[OptimizerGroup] = []
    clips: list[Clip] = []
    compiled: list[str] = []
    random: bool = False
    busy: list[str] = []
    entries: int = -1
    evaluated: dict[int, dict[str, int]] = {}


class RunInfo(msgspec.Struct):
    """`oracle.json`.

    Attributes:
        dropout: as of `CollectConfig`; "" in older recordings, which left it alone.
        replayed: digest of the reference's choices that the run `replayed` was given.
        forward: only forwards were recorded, in steps between two changes of the weights.
        whole: steps of which everything was recorded; of the others parameters, gradients, buffers and choices; () all.
        statistics: sums over tiles in the place of tensors.
    """

    schema: int
    command: list[str]
    program: str
    world: int = 0
    steps: int = 1
    samples: int = 0
    generate: int | None = None
    plan: str = ""
    notes: list[str] = []
    exit_code: int | None = None
    dropout: str = ""
    replayed: str = ""
    whole: list[int] = []
    forward: bool = False
    statistics: bool = False


class RankRecord:
    """What one rank recorded; tensors are mapped from disk when asked for.

    Attributes:
        entries: of training.
        dry: calls left out of each step.
        evaluations: tensors of forwards without gradients; `evaluation_draws` what dropped in them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = _decode(folder / "process.json", ProcessInfo)
        self._folded: dict[str, list[Entry]] = {}
        entries = list(_entries(folder / "index.jsonl"))
        if len(entries) < self.info.entries:
            lost = self.info.entries - len(entries)
            raise MissingRank(f"{folder / 'index.jsonl'}: {lost} of {self.info.entries} lines are lost", hint="record it again")
        self.evaluations = [e for e in entries if e.phase]
        self.evaluation_draws = [d for d in self.info.draws if d.phase]
        self.info.draws = [d for d in self.info.draws if not d.phase]
        self.entries, self.dry = without_dry_runs(self._fold([e for e in entries if not e.phase]))
        self._headers: dict[str, tuple[dict[str, Any], np.ndarray[Any, Any]]] = {}

    def array(self, entry: Entry) -> np.ndarray[Any, Any]:
        """The tensor's values, read-only, as numpy has them (`bfloat16` as `uint16`).

        Raises:
            OracleError: the file is damaged or does not hold it.
        """
        if entry.tensor in self._folded:
            return np.concatenate([self.array(e).ravel() for e in self._folded[entry.tensor]]).reshape(entry.shape)
        header, data = self._open(entry.file)
        found = header.get(entry.tensor)
        path = self.folder / entry.file
        if not isinstance(found, dict) or not isinstance(found.get("dtype"), str) or found["dtype"] not in RAW:
            raise OracleError(f"{path}: does not hold {entry.tensor}", hint="record it again")
        raw, name = RAW[found["dtype"]]
        try:
            start, stop = (int(x) for x in found["data_offsets"])
            shape = tuple(int(x) for x in found["shape"])
            size = math.prod(shape) * np.dtype(raw).itemsize
        except (TypeError, ValueError, KeyError, OverflowError):  # of an infinity no integer is made
            raise OracleError(f"{path}: its header is damaged", hint="record it again") from None
        if name != entry.dtype or shape != entry.shape or stop - start != size or not 0 <= start <= stop <= data.size:
            raise OracleError(f"{path}: {entry.tensor} is damaged", hint="record it again")
        return data[start:stop].view(raw).reshape(shape)

    def _fold(self, entries: list[Entry]) -> list[Entry]:
        """Flat spans of a parameter that this rank holds as a whole become one entry of its shape."""
        shapes = {e.name: e.shape for e in entries if e.kind == "param"}
        spans: dict[tuple[int, str, str, str], list[Entry]] = {}
        for entry in entries:
            if entry.span is not None:
                spans.setdefault((entry.step, entry.kind, entry.name, entry.slot), []).append(entry)
        whole: dict[str, Entry] = {}
        for held in spans.values():
            held.sort(key=lambda e: e.span or (0, 0))
            ends = [e.span for e in held if e.span is not None]
            shape = shapes.get(held[0].name)
            if shape is None or ends[0][0] != 0 or ends[-1][1] != int(np.prod(shape, dtype=np.int64)):
                continue
            if any(a[1] != b[0] for a, b in itertools.pairwise(ends)) or len({e.dtype for e in held}) > 1:
                continue
            key = f"folded-{held[0].tensor}"
            self._folded[key] = held
            whole[held[0].tensor] = msgspec.structs.replace(held[0], tensor=key, shape=shape, span=None)
        gone = {e.tensor for held in self._folded.values() for e in held} - whole.keys()
        return [whole.get(e.tensor, e) for e in entries if e.tensor not in gone]

    def _open(self, name: str) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        if name not in self._headers:
            path = self.folder / name
            if _DATA_NAME.fullmatch(name) is None or not path.is_file():
                raise OracleError(f"{path}: missing", hint="record it again")
            try:
                whole = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError):  # an empty file cannot be mapped
                raise OracleError(f"{path}: cannot be read", hint="record it again") from None
            length = int.from_bytes(whole[:8].tobytes(), "little") if whole.size >= 8 else -1
            if not 0 < length <= min(MAX_HEADER_BYTES, whole.size - 8):
                raise OracleError(f"{path}: not a safetensors file", hint="record it again")
            try:
                header = json.loads(whole[8 : 8 + length].tobytes())
            except (ValueError, RecursionError):
                raise OracleError(f"{path}: its header is damaged", hint="record it again") from None
            self._headers[name] = (header if isinstance(header, dict) else {}, whole[8 + length :])
        return self._headers[name]


class Recording:
    """A directory that `proctor oracle record` made."""

    def __init__(self, path: Path) -> None:
        if not (path / "oracle.json").is_file():
            raise OracleError(f"{path}: not a recording of the oracle", hint="proctor oracle record -o DIR -- CMD")
        self.path = path
        self.info = _decode(path / "oracle.json", RunInfo)
        if self.info.schema != SCHEMA:
            raise OracleError(f"{path}/oracle.json: schema {self.info.schema}, this Proctor reads {SCHEMA}", hint="update Proctor")

    def runs(self) -> list[str]:
        """Names of the runs that were recorded."""
        folder = self.path / "runs"
        return sorted(p.name for p in folder.iterdir() if RUN_NAME.fullmatch(p.name)) if folder.is_dir() else []

    def ranks(self, run: str = "clean") -> dict[int, RankRecord]:
        """What each rank recorded, by rank.

        Raises:
            OracleError: nothing was recorded, a file is damaged, or a rank is missing.
        """
        folder = self.path / "runs" / run
        found: dict[int, RankRecord] = {}
        for child in sorted(folder.iterdir()) if folder.is_dir() else []:
            match = _RANK_NAME.fullmatch(child.name)
            if match is not None and (child / "process.json").is_file():
                found[int(match[1])] = RankRecord(child)
        if not found:
            raise OracleError(f"{folder}: no rank recorded anything", hint="does the command train a torch module?")
        world = max(r.info.world for r in found.values())
        missing = sorted(set(range(world)) - found.keys())
        if missing:
            raise MissingRank(f"{folder}: {rank_text(missing)} of {world} missing", hint="did it fail? record it again")
        broken = next((r for r in found.values() if not r.info.done), None)
        if broken is not None:
            why = broken.info.notes[-1] if broken.info.notes else "it ended too early"
            raise MissingRank(f"{folder}: the recording of rank {broken.info.rank} is not complete: {why}", hint="record it again")
        return dict(sorted(found.items()))

    @property
    def trusted(self) -> str:
        """The run that it is as a reference: the one without `torch.compile`, of a program that compiles."""
        return EAGER if EAGER in self.runs() else CLEAN

    def noise(self) -> list[str]:
        """Runs that were recorded with noise."""
        return [name for name in self.runs() if name.startswith("noise-")]

    def strict(self) -> list[str]:
        """Runs with noise that allow nothing for 8-bit casts, of a program that has some."""
        return [name for name in self.runs() if name.startswith("strict-")]


class MissingRank(OracleError):
    """A rank left nothing: no verdict is possible."""

    exit_code = 3


class RankWriter:
    """Writes one rank's tensors; used inside the recorded process.

    Tensors wait in memory until `SHARD_BYTES` of them are there, so that memory stays bounded.

    Args:
        folder: the rank's directory; it is made.
        save: writes `{key: tensor}` to a path (`safetensors.torch.save_file`).
    """

    def __init__(self, folder: Path, save: Any) -> None:
        folder.mkdir(parents=True, exist_ok=False)
        self.folder = folder
        self._save = save
        self._waiting: dict[str, Any] = {}
        self._lines: list[dict[str, Any]] = []
        self._bytes = 0
        self._files = 0
        self._order = 0
        self._indexed = 0  # lines that were written

    def add(self, tensor: Any, *, dtype: str, size: int, **fields: Any) -> None:
        """Keep a tensor that nobody else will change.

        Args:
            tensor: on the CPU, contiguous.
            dtype: its type's name.
            size: in bytes.
            fields: those of `Entry` that the caller knows.
        """
        key = str(self._order)
        self._waiting[key] = tensor
        self._lines.append({**fields, "dtype": dtype, "shape": list(tensor.shape), "tensor": key, "order": self._order})
        self._order += 1
        self._bytes += size
        if self._bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits: the file first, then the lines that speak of it."""
        if not self._waiting:
            return
        name = f"data-{self._files:05d}.safetensors"
        try:
            self._save(self._waiting, str(self.folder / name))
        except Exception:
            self._waiting, self._lines = {}, []
            (self.folder / name).unlink(missing_ok=True)  # what there is of it: makes room to say what went wrong
            raise
        with opened(self.folder / "index.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT) as index:
            index.append(b"".join(msgspec.json.encode({**line, "file": name}) + b"\n" for line in self._lines))
        self._indexed += len(self._lines)
        self._waiting, self._lines, self._bytes = {}, [], 0
        self._files += 1

    def close(self, info: ProcessInfo) -> None:
        """Write what waits and what is known of the process, also that it could not be written."""
        try:
            self.flush()
        except Exception as e:  # noqa: BLE001 - a full disk; safetensors raises its own kind
            info.done = False
            info.notes.append(f"cannot be written: {e}")
        info.entries = self._indexed
        write_json(self.folder / "process.json", info)


def write_json(path: Path, value: Any) -> None:
    """Replace a small file as a whole.

    Raises:
        OracleError: it cannot be written.
    """
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    except OSError as e:
        raise OracleError(f"{path}: cannot be written: {e.strerror or e}") from None


def _entries(path: Path) -> Iterator[Entry]:
    try:
        blob = read_file(path, MAX_INDEX_BYTES)
    except FileNotFoundError:
        return
    except OSError as e:
        raise OracleError(f"{path}: {e.strerror or e}") from None
    decoder = msgspec.json.Decoder(Entry)
    for number, line in enumerate(BytesIO(blob), 1):
        if not line.endswith(b"\n"):
            return  # cut off by a kill: the file it speaks of is whole, the line is not
        try:
            yield decoder.decode(line)
        except UNREADABLE as e:
            raise OracleError(f"{path}:{number}: {e}", hint="record it again") from None


def _decode(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_file(path, MAX_INDEX_BYTES), type=kind)
    except OSError as e:
        raise OracleError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UNREADABLE as e:
        raise OracleError(f"{path}: {e}", hint="record it again") from None
