"""Reading runs: many processes and many runs become one set of frames with global codes.

`Trace` is what relations work on (integer codes, joined once). `Run` is what a person gets from
`proctor.open_run`: the same tables with names resolved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from proctor.errors import TraceError
from proctor.invariants.codec import definition, signature
from proctor.invariants.codec.variable import Variable, apart
from proctor.invariants.files import read_file
from proctor.invariants.schema import LATER, MAX_NAME_CHARS, TABLES, TRACE_SCHEMA, Name, Value
from proctor.invariants.trace.tables import Table, first_missing, lacks, no_rows, read_table
from proctor.invariants.trace.windows import Sieve, Window

_MAX_WAITING = 64  # calls of one process
_MAX_JSON_BYTES = 64 << 20
_MAX_UNOBSERVED = 5_000  # names of functions
_UPDATES = ("torch.optim.Optimizer.step", "torch.amp.GradScaler.step")
_MAX_BLIND = 100  # errors of ours


class Waiting(msgspec.Struct, frozen=True):
    """A collective that had not returned when its process was last heard of."""

    place: str  # `invariants.collective`
    item: int  # calls that the process made on the group before
    seconds: float  # how long it had been waiting
    site: str = ""
    call: int = 0


class Process(msgspec.Struct, frozen=True):
    """One recorded process of a run."""

    run: int
    rank: int
    world: int
    pid: int
    program: str
    folder: str
    coords: dict[str, int] = {}  # mesh coordinates by axis name, where known
    dropped: int = 0  # records lost
    notes: list[str] = []  # degradations, one sentence each
    finished: bool = False  # the process said goodbye
    waiting: list[Waiting] = []
    unobserved: list[str] = []  # functions that may have been called without a record
    damaged: int | None = None  # the step from which records are missing in its files, which are not as they were written
    definitions: dict[str, str] = {}  # what the user's functions and classes are (`invariants.definition`), by name
    blind: list[tuple[str, int]] = []  # what an error of ours ended, and in which step (`invariants.blindness`)


@dataclass
class Trace:
    """All records of one or more runs, with codes that are global to this object.

    calls: proc u16, seq, parent, fn, site, ctx, args, ret, t, dur, flags
    states: proc u16, seq, call, edge, ctx, var, meta, fp, norm, flags
    values: proc u16, seq, ctx, kind, place, item, meta, fp, norm, number, flags
    contexts: ctx, proc, step, micro, phase, grad, autocast, outer, recompute, meta
    """

    processes: list[Process]
    runs: list[str]
    calls: pl.DataFrame
    states: pl.DataFrame
    contexts: pl.DataFrame
    texts: dict[Name, list[str]]
    notes: list[str] = field(default_factory=list)
    values: pl.DataFrame = field(default_factory=lambda: _empty("values"))
    held: pl.DataFrame | None = None  # of a window: proc, var of all variables that the whole has states of
    past: dict[str, pl.DataFrame] = field(default_factory=dict)  # of a run that goes on: what relations remember of it
    over: int = -2  # of a run that goes on: the last step that all processes have ended
    since: int = 1 << 30  # of a run that goes on: the first of the steps that are judged now

    @classmethod
    def load(cls, paths: Sequence[str | Path], window: Window | None = None, *, lives: bool = False) -> Trace:
        """Read and merge run directories.

        Args:
            paths: of the runs.
            window: keep only what it holds; never more than that is in memory.
            lives: each life of a job that an elastic launcher has started again is a run of its own, so that its ranks are
                compared. Without it a rank that is there twice is compared with none.

        Raises:
            TraceError: a path is not a run directory of a schema that we read, or holds no process at all.
        """
        merge = _Merge(window)
        for path in paths:
            merge.add(Path(path), lives=lives)
        return merge.trace()

    # -- names --------------------------------------------------------------------------------------------

    @property
    def functions(self) -> list[str]:
        return self.texts[Name.FUNCTION]

    @property
    def sites(self) -> list[str]:
        return self.texts[Name.SITE]

    @property
    def places(self) -> list[str]:
        return self.texts.get(Name.PLACE, [""])

    @cached_property
    def function_code(self) -> dict[str, int]:
        return {text: code for code, text in enumerate(self.functions)}

    @cached_property
    def features(self) -> list[dict[str, signature.Plain]]:
        """Flattened signature of every signature code."""
        return [signature.features(text) for text in self.texts[Name.SIGNATURE]]

    @cached_property
    def left_out(self) -> dict[int, frozenset[str]]:
        """Features that a signature does not tell although the call had them, by signature code; only where there are any."""
        texts = self.texts.get(Name.SIGNATURE, [])
        return {code: missing for code, text in enumerate(texts) if (missing := signature.left_out(text))}

    @cached_property
    def variables(self) -> pl.DataFrame:
        """One row a variable code: var, model, name, attr, role, module, kind, position, alias."""
        return variables_frame([decode_variable(text) for text in self.texts[Name.VARIABLE]])

    @cached_property
    def metas(self) -> pl.DataFrame:
        """One row a meta code: meta, and one text column for each attribute seen, null where it is not set."""
        return metas_frame([flat_meta(text) for text in self.texts[Name.META]])

    @cached_property
    def procs(self) -> pl.DataFrame:
        """One row a process: proc, run, rank, world, program."""
        return pl.DataFrame(
            {
                "proc": pl.Series(range(len(self.processes)), dtype=pl.UInt16),
                "run": pl.Series([p.run for p in self.processes], dtype=pl.UInt16),
                "rank": pl.Series([p.rank for p in self.processes], dtype=pl.Int32),
                "world": pl.Series([p.world for p in self.processes], dtype=pl.Int32),
                "program": pl.Series([p.program for p in self.processes], dtype=pl.String),
            }
        )

    @cached_property
    def families(self) -> pl.DataFrame:
        """What kind of program each process runs: proc, family.

        A family is the classes of the modules that own its parameters, so that sizes, depths and script names do
        not matter; a process without a model has the name of its program.
        """
        owners = (
            (self.states.select("proc", "var").unique() if self.held is None else self.held)
            .join(self.variables.filter((pl.col("role") == "parameter") & (pl.col("module") != "")), on="var")
            # How many models of one class there are is a size.
            .select("proc", pl.concat_str(pl.col("model").str.replace(r"#\d+$", ""), pl.lit("/"), "module").alias("m"))
            .unique()
            .group_by("proc")
            .agg(pl.col("m").sort().str.join(" ").alias("family"))
        )
        return (
            self.procs.join(owners, on="proc", how="left", maintain_order="left")
            .select("proc", pl.coalesce("family", "program").alias("family"))
        )

    @property
    def programs(self) -> set[str]:
        return {p.program for p in self.processes}

    @cached_property
    def steps(self) -> int:
        """Training steps seen by the process that saw most. A last one without an update is half a step: it does not count."""
        begun = self.contexts["step"].max()
        codes = [code for code, name in enumerate(self.functions) if name in _UPDATES]
        acts = self.calls.filter(pl.col("fn").is_in(codes)).select("ctx").unique()
        done = self.contexts.join(acts, on="ctx", how="semi")["step"].max()
        if not isinstance(begun, int) or begun < 0:
            return 0
        return begun if done == begun - 1 and begun > 0 else begun + 1


class Run:
    """A recorded run for people and notebooks: frames with names resolved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = Trace.load([path], lives=True)
        self.info: dict[str, Any] = _read_json(path / "run.json")

    def _named(self, frame: pl.DataFrame, column: str, kind: Name) -> pl.DataFrame:
        texts = pl.DataFrame(
            {column: pl.Series(range(len(self.trace.texts[kind])), dtype=pl.UInt32), "_t": self.trace.texts[kind]}
        )
        return frame.join(texts, on=column, how="left", maintain_order="left").with_columns(
            pl.col("_t").alias(column)
        ).drop("_t")

    def _with_context(self, frame: pl.DataFrame) -> pl.DataFrame:
        frame = frame.join(self.trace.contexts.drop("proc"), on="ctx", how="left", maintain_order="left").drop("ctx")
        return frame.join(self.trace.procs.drop("run", "program"), on="proc", how="left", maintain_order="left").drop("proc")

    @cached_property
    def calls(self) -> pl.DataFrame:
        """One row a call: function, source, arguments, result, times, step, phase, rank."""
        frame = self.trace.calls
        for column, kind in (("fn", Name.FUNCTION), ("site", Name.SITE), ("args", Name.SIGNATURE), ("ret", Name.SIGNATURE)):
            frame = self._named(frame, column, kind)
        return self._with_context(frame)

    @cached_property
    def states(self) -> pl.DataFrame:
        """One row a change of a variable: name, attribute, fingerprint, norm, flags, step, rank."""
        frame = self.trace.states.join(self.trace.variables, on="var", how="left", maintain_order="left")
        frame = frame.join(self.trace.metas, on="meta", how="left", maintain_order="left").drop("var")
        return self._with_context(frame.drop("meta"))

    @cached_property
    def values(self) -> pl.DataFrame:
        """One row a value seen at a call: kind, place, fingerprint or number, step, rank."""
        frame = self._named(self.trace.values, "place", Name.PLACE)
        kinds = {int(kind): kind.name.lower() for kind in Value}
        frame = frame.with_columns(pl.col("kind").replace_strict(kinds, default="", return_dtype=pl.String))
        frame = frame.join(self.trace.metas, on="meta", how="left", maintain_order="left").drop("meta")
        return self._with_context(frame)

    @cached_property
    def context(self) -> pl.DataFrame:
        return self.trace.contexts

    @property
    def processes(self) -> list[Process]:
        return self.trace.processes

    def __repr__(self) -> str:
        t = self.trace
        return f"<Run {self.path}: {len(t.processes)} processes, {t.steps} steps, {t.calls.height} calls, {t.states.height} states>"


def open_run(path: str | Path) -> Run:
    """Open a run directory; see `proctor.open_run`."""
    return Run(Path(path))


def variables_frame(rows: Sequence[Variable]) -> pl.DataFrame:
    """`variables`, from what the texts say."""
    return pl.DataFrame(
        {
            "var": pl.Series(range(len(rows)), dtype=pl.UInt32),
            **{
                f: pl.Series([getattr(r, f) for r in rows], dtype=pl.String)
                for f in Variable.__struct_fields__
            },
        }
    )


def metas_frame(parsed: Sequence[Mapping[str, str]]) -> pl.DataFrame:
    """`metas`, from what the texts say."""
    keys = sorted({k for p in parsed for k in p})
    return pl.DataFrame(
        {
            "meta": pl.Series(range(len(parsed)), dtype=pl.UInt32),
            **{k: pl.Series([p.get(k) for p in parsed], dtype=pl.String) for k in keys},
        }
    )


def decode_variable(text: str) -> Variable:
    try:
        var = msgspec.json.decode(text, type=Variable)
        if "#" not in var.model:
            return var
        return msgspec.structs.replace(var, name=apart(var.model, var.name), alias=apart(var.model, var.alias))
    except msgspec.MsgspecError:
        return Variable("", "", "", "")


def flat_meta(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(k): _plain(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else {}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _read_json(path: Path) -> dict[str, Any]:
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


class _Merge:
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
        info = _read_json(path / "run.json")
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
        starts = [_int(facts.get("restart"), 0) if lives else 0 for facts in said]
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
            return _read_json(folder / "process.json")
        except TraceError:
            self.notes.append(f"{folder.name}: process.json is missing or damaged; its rank is taken as 0")
            return {}

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

    def trace(self) -> Trace:
        if not self.processes:
            self.notes.append("nothing was recorded")
        return Trace(
            processes=self.processes,
            runs=self.runs,
            calls=self._stack("calls"),
            states=self._stack("states"),
            values=self._stack("values"),
            contexts=self._stack("context"),
            texts={kind: list(index) for kind, index in self.index.items()},
            held=pl.concat(self.held) if self.held else None,
            notes=self.notes + [f"rank {p.rank}: {n}" for p in self.processes for n in p.notes],
        )

    def _stack(self, table: str) -> pl.DataFrame:
        frames = self.frames[table]
        if frames:
            return pl.concat(frames)
        return _empty(table)


def _distinct_contexts(table: pa.Table) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table)).filter(pl.col("ctx") < 1 << 26)
    return frame.unique("ctx", keep="last", maintain_order=True)


def _empty(table: str) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(no_rows(TABLES[table])))
    return frame.select(pl.lit(0, dtype=pl.UInt16).alias("proc"), *frame.columns).clear()


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


def process_of(info: Mapping[str, Any], run: int, program: str, folder: str) -> Process:
    """What a `process.json` says; fields that make no sense are as if they were not there."""
    coords, notes, unseen = info.get("coords"), info.get("notes", []), info.get("unobserved")
    return Process(
        run=run,
        rank=_int(info.get("rank"), 0),
        world=_int(info.get("world"), 1),
        pid=_int(info.get("pid"), 0),
        program=program,
        folder=folder,
        coords={str(k): _int(v, 0) for k, v in coords.items()} if isinstance(coords, dict) else {},
        dropped=_int(info.get("dropped"), 0),
        notes=[str(n) for n in notes] if isinstance(notes, list) else [],
        finished=bool(info.get("finished", False)),
        waiting=_waiting(info),
        unobserved=[str(n) for n in unseen[:_MAX_UNOBSERVED]] if isinstance(unseen, list) else [],
        definitions=_definitions(info.get("definitions")),
        blind=_blind(info.get("blind")),
    )


def _definitions(said: Any) -> dict[str, str]:
    pairs = list(said.items())[:_MAX_UNOBSERVED] if isinstance(said, dict) else []
    return {name: text for name, text in pairs if isinstance(text, str) and len(text) <= definition.MAX_CHARS}


def _blind(said: Any) -> list[tuple[str, int]]:
    pairs = [p for p in said[:_MAX_BLIND] if isinstance(p, list) and len(p) == 2] if isinstance(said, list) else []
    return [(str(what)[:100], step) for what, step in pairs if isinstance(step, int) and not isinstance(step, bool)]


def _waiting(info: Mapping[str, Any]) -> list[Waiting]:
    said, now = info.get("open"), info.get("clock")
    found = []
    for one in said[:_MAX_WAITING] if isinstance(said, list) else []:
        since = one.get("since") if isinstance(one, dict) else None
        if isinstance(since, int) and isinstance(now, int) and isinstance(one.get("place"), str):
            seconds = min(max((now - since) / 1e9, 0.0), 1e9)
            found.append(Waiting(one["place"], _int(one.get("item"), 0), seconds, str(one.get("site", "")), _int(one.get("call"), 0)))
    return found


def _int(value: Any, default: int) -> int:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return int(value) if fits else default
