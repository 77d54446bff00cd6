"""Processes of many runs become one set of frames: codes that each process gave for itself become codes of the whole.

`Trace.load` gives run directories, the live checker parts that came over a connection. Process 0 calls `relu` 7 and process 1
calls it 3; after merging both say 12, and 0 stands for what no name was flushed for. Damage is noted with its step, not raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from proctor.errors import TraceError
from proctor.invariants.files import read_file
from proctor.invariants.schema import LATER, MAX_NAME_CHARS, TABLES, TRACE_SCHEMA, Name
from proctor.invariants.trace.process import Process, process_of, whole_number, word_left
from proctor.invariants.trace.tables import Table, empty, first_missing, lacks, no_rows, read_table
from proctor.invariants.trace.windows import Sieve, Window

_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file. Raises `TraceError`: it is none, or cannot be read."""
    try:
        data = json.loads(read_file(path, _MAX_JSON_BYTES))
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}", hint="proctor record -o RUN -- python train.py") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: not JSON, so {path.parent} is not a run directory") from None
    if not isinstance(data, dict):
        raise TraceError(f"{path}: expected an object, found {type(data).__name__}")
    return data


@dataclass(frozen=True)
class Part:
    """What one process wrote: its `process.json`, and its tables with its own codes.

    damaged: the step from which rows are missing in its files, where those are not as they were written.
    holes: contexts or names are among what is missing, so rows that refer to them say nothing.
    """

    info: Mapping[str, Any]
    folder: str
    tables: Mapping[str, pa.Table]
    damaged: int | None = None
    holes: bool = False


class Merge:
    """Collects processes; local codes become codes of the merged trace."""

    def __init__(self, window: Window | None) -> None:
        self.window = window
        self.processes: list[Process] = []
        self.runs: list[str] = []
        self.notes: list[str] = []
        self.index: dict[Name, dict[str, int]] = {kind: {"": 0} for kind in Name}
        self.frames: dict[str, list[pl.DataFrame]] = {"calls": [], "states": [], "values": [], "context": []}
        self.held: list[pl.DataFrame] = []
        self.next_ctx = 1

    def add(self, path: Path, *, lives: bool = False) -> None:
        if not path.is_dir():
            what = "not a directory" if path.exists() else "no such directory"
            raise TraceError(f"{path}: {what}", hint="proctor record -o RUN -- python train.py")
        info = read_json(path / "run.json")
        version = info.get("schema")
        if not isinstance(version, int):
            raise TraceError(f"{path / 'run.json'}: no schema number, so this is not a run directory")
        if version > TRACE_SCHEMA:
            raise TraceError(
                f"{path}: trace schema {version}, this Proctor reads up to {TRACE_SCHEMA}", hint="pip install -U proctor"
            )
        program = str(info.get("program", path.name))
        folders = sorted(p for p in (path / "procs").glob("*") if p.is_dir()) if (path / "procs").is_dir() else []
        said = [self._process_info(folder) for folder in folders]
        starts = [whole_number(facts.get("restart"), 0) if lives else 0 for facts in said]
        runs: dict[int, int] = {}
        for start in sorted({*starts}) or [0]:
            runs[start] = len(self.runs)
            self.runs.append(f"{path} (restart {start})" if start else str(path))
        for folder, facts, start in zip(folders, said, starts, strict=True):
            self._add_process(folder, facts, runs[start], program, version)
        if not folders:
            self.notes.append(f"{path}: no process of this run trained, so nothing was recorded")

    def _process_info(self, folder: Path) -> dict[str, Any]:
        try:
            info = read_json(folder / "process.json")
        except TraceError:
            self.notes.append(f"{folder.name}: process.json is missing or damaged; its rank is taken as 0")
            info = {}
        ended = word_left(folder)
        if ended is None:
            return info
        said = info.get("blind")
        return {**info, "blind": [ended, *(said if isinstance(said, list) else [])]}

    def _add_process(self, folder: Path, info: dict[str, Any], run: int, program: str, schema: int) -> None:
        tables: dict[str, pa.Table] = {}
        read: dict[str, Table] = {}
        sieve: Sieve | None = None
        for table in ("context", *(t for t in TABLES if t != "context")):
            if LATER.get(table, 0) > schema:
                tables[table] = no_rows(TABLES[table])
                continue
            chosen = sieve if table in ("calls", "states", "values") else None
            read[table] = found = read_table(folder / f"{table}.arrow", table, chosen)
            tables[table] = found.rows
            if found.cut:
                self.notes.append(f"{folder.name}/{found.cut}")
            if table == "context" and self.window is not None:
                sieve = Sieve(self.window, _distinct_contexts(tables[table]))
        lacking = lacks(info, read)
        damaged = first_missing(lacking, read) if info else -1
        holes = any(read[table].cut or table in lacking for table in ("names", "context") if table in read)
        self.notes += [f"{folder.name}/{text}" for text in lacking.values()]
        self.add_tables(Part(info, str(folder), tables, damaged, holes), run, program, sieve)

    def add_tables(self, part: Part, run: int, program: str, sieve: Sieve | None) -> None:
        """One process of a run; the sieve is what its rows went through, if anything."""
        info, tables = part.info, part.tables
        proc = len(self.processes)
        self.processes.append(msgspec.structs.replace(process_of(info, run, program, part.folder), damaged=part.damaged))
        maps = self._code_maps(tables["names"])
        ctx = self._contexts(tables["context"], proc, sieve)
        for table, columns in (
            ("calls", {"fn": Name.FUNCTION, "site": Name.SITE, "args": Name.SIGNATURE, "ret": Name.SIGNATURE}),
            ("states", {"var": Name.VARIABLE, "meta": Name.META}),
            ("values", {"place": Name.PLACE, "meta": Name.META}),
        ):
            frame = pl.DataFrame(pl.from_arrow(tables[table]))
            if sieve is not None and table == "states":
                frame = pl.concat([sieve.carried(), frame])
                held = sorted({int(v) for v in _take(maps[Name.VARIABLE], sieve.variables())})
                self.held.append(pl.DataFrame({"var": pl.Series(held, dtype=pl.UInt32)}).select(pl.lit(proc, dtype=pl.UInt16).alias("proc"), "var"))
            remapped = [
                pl.Series(c, _take(maps[kind], frame[c].to_numpy()), dtype=pl.UInt32) for c, kind in columns.items()
            ]
            remapped.append(pl.Series("ctx", _take(ctx, frame["ctx"].to_numpy()), dtype=pl.UInt32))
            frame = frame.with_columns(remapped)
            if part.holes:
                frame = frame.filter(~_nameless(tables[table], frame, ["ctx", *columns]))
            frame = frame.select(pl.lit(proc, dtype=pl.UInt16).alias("proc"), *frame.columns)
            self.frames[table].append(frame.sort("seq", maintain_order=True))

    def _code_maps(self, names: pa.Table) -> dict[Name, np.ndarray[Any, Any]]:
        kinds = names.column("kind").to_pylist()
        ids = names.column("id").to_pylist()
        texts = names.column("text").to_pylist()
        local: dict[Name, dict[int, int]] = {kind: {} for kind in Name}
        for kind, code, text in zip(kinds, ids, texts):
            if kind not in Name._value2member_map_ or text is None or len(text) > MAX_NAME_CHARS or code > 1 << 26:
                continue
            index = self.index[Name(kind)]
            local[Name(kind)][code] = index.setdefault(text, len(index))
        out = {}
        for kind, table in local.items():
            array = np.zeros(max(table, default=0) + 1, dtype=np.uint32)
            for code, target in table.items():
                array[code] = target
            out[kind] = array
        return out

    def _contexts(self, table: pa.Table, proc: int, sieve: Sieve | None) -> np.ndarray[Any, Any]:
        frame = _distinct_contexts(table)
        if sieve is not None:
            frame = sieve.contexts(frame)
        highest = frame["ctx"].max()
        mapping = np.zeros((int(highest) if isinstance(highest, int) else 0) + 1, dtype=np.uint32)
        codes = np.arange(self.next_ctx, self.next_ctx + frame.height, dtype=np.uint32)
        self.next_ctx += frame.height
        mapping[frame["ctx"].to_numpy()] = codes
        frame = frame.with_columns(pl.Series("ctx", codes), pl.lit(proc, dtype=pl.UInt16).alias("proc"))
        self.frames["context"].append(frame)
        return mapping

    def fields(self) -> dict[str, Any]:
        """What `Trace` is made of."""
        if not self.processes:
            self.notes.append("nothing was recorded")
        return {
            "processes": self.processes,
            "runs": self.runs,
            "calls": self._stack("calls"),
            "states": self._stack("states"),
            "values": self._stack("values"),
            "contexts": self._stack("context"),
            "texts": {kind: list(index) for kind, index in self.index.items()},
            "held": pl.concat(self.held) if self.held else None,
            "ends": self.window is None or self.window.last,
            "notes": self.notes + [f"rank {p.rank}: {n}" for p in self.processes for n in p.notes],
        }

    def _stack(self, table: str) -> pl.DataFrame:
        frames = self.frames[table]
        if frames:
            return pl.concat(frames)
        return empty(table)


def _distinct_contexts(table: pa.Table) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table)).filter(pl.col("ctx") < 1 << 26)
    return frame.unique("ctx", keep="last", maintain_order=True)


def _take(mapping: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Map codes; those that no name was flushed for become 0."""
    safe = np.where(codes < len(mapping), codes, 0)
    taken: np.ndarray[Any, Any] = mapping[safe]
    return taken


def _nameless(table: pa.Table, frame: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    """Rows with a code that stands for nothing although it stood for something where it was written.

    Args:
        table: with codes as they were written; a window's frame may begin with rows of its own.
        frame: the same with codes of the trace.
        columns: that hold codes.
    """
    before = pl.DataFrame(pl.from_arrow(table))
    added = frame.height - before.height
    lost = pl.Series([False], dtype=pl.Boolean).new_from_index(0, before.height)
    for column in columns:
        lost |= (before[column] != 0) & (frame[column].slice(added) == 0)
    return pl.concat([pl.Series([False], dtype=pl.Boolean).new_from_index(0, added), lost])
