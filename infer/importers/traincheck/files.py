"""Finding and reading TrainCheck's trace files: JSON lines, compressed or not, one record at a time.

A torn last line, `NaN`, unknown keys and lines that are no records are expected; they are counted, not fatal. Memory
is bounded by the longest line times the number of files, because files are merged by time while they are read.
"""

from __future__ import annotations

import errno
import gzip
import heapq
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from proctor.errors import TraceError
from proctor.infer.importers.traincheck.strict import decode

MAX_LINE_BYTES: Final = 64 << 20
MAX_FILES: Final = 500  # open at a time
_SUFFIXES: Final = (".log", ".json", ".jsonl", ".log.gz", ".json.gz", ".jsonl.gz", ".gz")
_PREFIXES: Final = ("trace_", "proxy_log")
_SNIFFED: Final = 5  # lines looked at in a file of another name
_HINT: Final = "name the folder that traincheck-collect wrote"

KINDS: Final = {
    "function_call (pre)": 0,
    "function_call (post)": 1,
    "function_call (post) (exception)": 2,
    "state_change": 3,
}


class Line(NamedTuple):
    """One record; ordered by time, then file, then line."""

    time: int  # ns
    file: int
    line: int
    kind: int  # `tables.Record`
    pid: int
    thread: int
    record: dict[str, Any]


@dataclass
class Losses:
    """What could not be read."""

    lines: int = 0  # no JSON, or no records
    long: int = 0  # longer than `MAX_LINE_BYTES`
    cut: list[str] = field(default_factory=list)  # files whose last line or compression is torn

    def notes(self) -> list[str]:
        out = [f"{name} was cut short" for name in self.cut[:20]]
        if self.lines:
            out.append(f"left out lines that are no TrainCheck records: {self.lines}")
        if self.long:
            out.append(f"left out lines of more than {MAX_LINE_BYTES >> 20} MiB: {self.long}")
        return out


def find(source: Path) -> list[Path]:
    """Trace files of a folder, sorted; a file stands for itself.

    Raises:
        TraceError: there is no such folder, or none of its files is a trace.
    """
    if source.is_file():
        return [source]
    try:
        files = sorted(p for p in source.iterdir() if p.is_file() and p.name.endswith(_SUFFIXES))
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}", hint=_HINT) from None
    named = [p for p in files if p.name.startswith(_PREFIXES)]
    found = named or [p for p in files if _is_trace(p)]
    if not found:
        raise TraceError(f"{source}: no TrainCheck traces (trace_*.log, proxy_log.json, also gzipped)", hint=_HINT)
    if len(found) > MAX_FILES:
        raise TraceError(f"{source}: {len(found)} trace files, at most {MAX_FILES} can be merged")
    return found


def read(files: Sequence[Path], losses: Losses) -> Iterator[Line]:
    """Records of all files by time; the order within a file is kept.

    Raises:
        TraceError: a file cannot be opened.
    """
    yield from heapq.merge(*(_read(path, i, losses) for i, path in enumerate(files)), key=_by_time)


def _by_time(line: Line) -> int:
    return line.time


def _is_trace(path: Path) -> bool:
    losses = Losses()
    try:
        lines = (_parse(blob, 0, 0, losses) for blob, _ in zip(_lines(path, losses), range(_SNIFFED)))
        return any(line is not None for line in lines)
    except TraceError:
        return False


def _read(path: Path, file: int, losses: Losses) -> Iterator[Line]:
    torn = False
    for number, blob in enumerate(_lines(path, losses)):
        line = _parse(blob, file, number, losses)
        torn = line is None and not blob.endswith(b"\n")
        if line is not None:
            yield line
    if torn:
        losses.lines -= 1
        losses.cut.append(path.name)


def _lines(path: Path, losses: Losses) -> Iterator[bytes]:
    try:
        with _open(path) as source:
            while blob := source.readline(MAX_LINE_BYTES):
                if len(blob) == MAX_LINE_BYTES and not blob.endswith(b"\n"):
                    losses.long += 1
                    while blob and not blob.endswith(b"\n"):
                        blob = source.readline(MAX_LINE_BYTES)
                elif blob.strip():
                    yield blob
    except (EOFError, gzip.BadGzipFile, zlib.error):
        losses.cut.append(path.name)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _parse(blob: bytes, file: int, number: int, losses: Losses) -> Line | None:
    try:
        record = decode(blob)
    except (ValueError, RecursionError):
        record = None
    line = _line(record, file, number) if isinstance(record, dict) else None
    if line is None:
        losses.lines += 1
    return line


def _line(record: dict[str, Any], file: int, number: int) -> Line | None:
    kind = KINDS.get(record.get("type", "")) if isinstance(record.get("type"), str) else None
    time, pid, thread = _time(record.get("time")), _integer(record.get("process_id")), _integer(record.get("thread_id"))
    if kind is None or time is None or pid is None or not 0 <= pid < 1 << 31:
        return None
    if kind == KINDS["state_change"]:
        complete = isinstance(record.get("var_name"), str) and isinstance(record.get("attributes"), dict)
    else:
        complete = isinstance(record.get("function"), str) and record.get("func_call_id") is not None
    return Line(time, file, number, kind, pid, thread or 0, record) if complete else None


def _time(value: Any) -> int | None:
    """Nanoseconds, of which any two have a difference of 64 bits; a time with a fraction is in seconds."""
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        value = value * 1e9
    time = _integer(value)
    return time if time is not None and -(1 << 62) <= time < 1 << 62 else None


def _integer(value: Any) -> int | None:
    """An integer of 64 bits, also when it is written as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if -(1 << 63) <= int(value) < 1 << 63 else None
