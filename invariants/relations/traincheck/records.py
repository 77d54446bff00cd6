"""Records of an imported run: calls with their beginning and end, states, and their texts.

Calls that never returned are treated as TrainCheck treats them: where a process was cut off in the middle of a call,
what its thread recorded from there on is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
from pyarrow import ipc

from proctor.errors import TraceError
from proctor.invariants.files import read_file
from proctor.invariants.relations.traincheck.tables import (
    PARAMETERS_FILE,
    RECORDS,
    RECORDS_FILE,
    TEXTS,
    TEXTS_FILE,
    Record,
)
from proctor.invariants.relations.views.frames import memo
from proctor.invariants.trace import Trace

MAX_PARAMETERS_BYTES: Final = 64 << 20
# A function with more records in a row than this is taken for one that repeats, and no order is checked for it.
MAX_CONSECUTIVE: Final = 4

Parameter = tuple[str, str, Any]  # name, kind (`p`, `*`, `k`, `**`), JSON of a typed default or null


@dataclass
class Records:
    """TrainCheck's view of a trace; codes index `texts`.

    calls: proc, thread, seq, step, name, meta, obj, file, line, args, t0, t1, status, ret, ordered by time. `status` is
        the `Record` that ended the call, null for one that never returned; its `t1` is one behind the last record.
    states: proc, thread, seq, step, name, meta, body, time, file, line, ordered by time.
    end: time of the last record of each run, by process.
    consecutive: most records of one function in a row, by function code.
    """

    calls: pl.DataFrame
    states: pl.DataFrame
    texts: pl.Series
    parameters: dict[str, list[Parameter]]
    pids: list[int]
    end: list[int]
    consecutive: dict[int, int]
    _parsed: dict[int, Any] = field(default_factory=dict)

    def parse(self, codes: Iterable[int]) -> dict[int, Any]:
        """Decoded texts of these codes; an empty object where one is damaged."""
        wanted = [c for c in dict.fromkeys(codes) if c not in self._parsed]
        for code, text in zip(wanted, self.texts.gather(wanted).to_list(), strict=True):
            self._parsed[code] = _decode(text)
        return self._parsed

    @cached_property
    def names(self) -> dict[int, str]:
        """Text of every function code."""
        codes = self.calls["name"].unique().to_list()
        return dict(zip(codes, self.texts.gather(codes).to_list(), strict=True))

    @cached_property
    def codes(self) -> dict[str, list[int]]:
        """Codes of every function: the same text may have one in each process."""
        out: dict[str, list[int]] = {}
        for code, text in self.names.items():
            out.setdefault(text, []).append(code)
        return out

    @cached_property
    def _calls_by_name(self) -> dict[int, pl.DataFrame]:
        parts = self.calls.partition_by("name", as_dict=True, maintain_order=True)
        return {int(key[0]): part for key, part in parts.items()}

    def calls_of(self, function: str) -> pl.DataFrame:
        """Calls of one function, by time."""
        parts = [self._calls_by_name[c] for c in self.codes.get(function, ())]
        if not parts:
            return self.calls.clear()
        return parts[0] if len(parts) == 1 else pl.concat(parts).sort("t0", maintain_order=True)

    @cached_property
    def staged(self) -> bool:
        """Whether the program named its stages: then a record without one belongs to `init`."""
        return bool(self.texts.str.contains('"meta_vars.stage"', literal=True).any())

    def arguments(self, function: str, args: Any, *, defaults: bool = False) -> dict[str, Any]:
        """Arguments of a call by name; positional ones where the parameters of the function are known.

        Args:
            function: its name.
            args: the decoded `args` column of the call.
            defaults: also those that were left to their default.
        """
        positional = args.get("args") if isinstance(args.get("args"), dict) else {}
        named = args.get("kwargs") if isinstance(args.get("kwargs"), dict) else {}
        out = dict(named)
        parameters = self.parameters.get(function, [])
        if all(kind.startswith("*") for _, kind, _ in parameters):
            return out
        for position, value in positional.items():
            if position.isdigit() and int(position) < len(parameters):
                out[parameters[int(position)][0]] = value
        if defaults:
            out |= {name: typed for name, _, typed in parameters if typed is not None and name not in out}
        return out


def records(trace: Trace) -> Records | None:
    """TrainCheck's records of a trace; `None` where no run of it was imported."""
    return memo(trace, "traincheck", _load)


def _load(trace: Trace) -> Records | None:
    frames, texts, offset = [], [pl.Series([""], dtype=pl.String)], 1
    parameters: dict[str, list[Parameter]] = {}
    for proc, process in enumerate(trace.processes):
        folder = Path(process.folder)
        if not (folder / RECORDS_FILE).exists():
            continue
        frame = pl.DataFrame(pl.from_arrow(_read(folder / RECORDS_FILE, RECORDS)))
        known = pl.DataFrame(pl.from_arrow(_read(folder / TEXTS_FILE, TEXTS)))
        size = known.height
        if size and known["id"].to_list() != list(range(1, size + 1)):
            raise TraceError(f"{folder / TEXTS_FILE}: codes are not in order", hint="proctor import traincheck again")
        lost = pl.lit(0, dtype=pl.UInt32)
        frame = frame.with_columns(
            pl.when(pl.col(c).is_between(1, size)).then(pl.col(c) + (offset - 1)).otherwise(lost).alias(c)
            for c in ("name", "meta", "body")
        )
        frames.append(frame.select(pl.lit(proc, dtype=pl.UInt16).alias("proc"), pl.all()))
        texts.append(known["text"])
        offset += size
        parameters |= _parameters(folder.parent.parent / PARAMETERS_FILE)
    if not frames:
        return None
    rows = _without_torn_calls(pl.concat(frames))
    last: dict[int, int] = {}
    for proc, time in rows.group_by("proc").agg(pl.col("time").max()).iter_rows():
        run = trace.processes[proc].run
        last[run] = max(time, last.get(run, time))
    return Records(
        calls=_calls(rows),
        states=_states(rows),
        texts=pl.concat(texts),
        parameters=parameters,
        pids=[p.pid for p in trace.processes],
        end=[last.get(p.run, 0) for p in trace.processes],
        consecutive=_consecutive(rows),
    )


def _calls(rows: pl.DataFrame) -> pl.DataFrame:
    begun = rows.filter(pl.col("kind") == int(Record.PRE)).rename({"time": "t0", "body": "args"}).drop("kind")
    ended = rows.filter(pl.col("kind").is_in([int(Record.POST), int(Record.RAISED)])).select(
        "proc", "seq", pl.col("time").alias("t1"), pl.col("kind").alias("status"), pl.col("body").alias("ret")
    )
    last = rows.group_by("proc", "thread").agg((pl.col("time").max() + 1).alias("_last"))
    calls = begun.join(ended, on=["proc", "seq"], how="left").join(last, on=["proc", "thread"], how="left")
    calls = calls.with_columns(pl.coalesce("t1", "_last").alias("t1")).drop("_last")
    return calls.sort("t0", "proc", "seq", maintain_order=True)


def _states(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("kind") == int(Record.STATE)).drop("kind", "obj").sort("time", maintain_order=True)


def _without_torn_calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Leave out what a thread recorded from the first of its calls on that never returned.

    The outermost call of a process may stay open: a trace often begins inside one. Where the outermost call did
    return last of all, an open call is one of another thread, and only it is left out.
    """
    is_pre = pl.col("kind") == int(Record.PRE)
    ended = rows.filter(pl.col("kind").is_in([int(Record.POST), int(Record.RAISED)])).select("proc", "seq", pl.col("time").alias("_end"))
    begun = rows.filter(is_pre).join(ended, on=["proc", "seq"], how="left", maintain_order="left")
    torn = begun.filter(pl.col("_end").is_null())
    if torn.is_empty():
        return rows
    first = rows.group_by("proc").agg(pl.col("time").min().alias("_first"))
    outer = begun.join(first, on="proc").filter(pl.col("time") == pl.col("_first")).unique("proc", keep="first", maintain_order=True)
    last = rows.group_by("proc", "thread").agg(pl.col("time").max().alias("_last"))
    torn = torn.join(outer.select("proc", "seq", pl.lit(value=True).alias("_outer")), on=["proc", "seq"], how="left")
    torn = torn.filter(pl.col("_outer").is_null()).join(
        outer.select("proc", pl.col("_end").alias("_returned")), on="proc", how="left"
    )
    torn = torn.join(last, on=["proc", "thread"]).with_columns(
        (pl.col("_returned") == pl.col("_last")).fill_null(value=False).alias("_alone")
    )
    alone = torn.filter("_alone").select("proc", "seq")
    cuts = torn.filter(~pl.col("_alone")).group_by("proc", "thread").agg(pl.col("time").min().alias("_cut"))
    kept = rows.join(cuts, on=["proc", "thread"], how="left", maintain_order="left")
    kept = kept.filter(pl.col("_cut").is_null() | (pl.col("time") < pl.col("_cut"))).drop("_cut")
    calls = pl.col("kind") != int(Record.STATE)
    return pl.concat(
        [kept.filter(~calls), kept.filter(calls).join(alone, on=["proc", "seq"], how="anti", maintain_order="left")]
    ).sort("proc", "time", maintain_order=True)


def _consecutive(rows: pl.DataFrame) -> dict[int, int]:
    calls = pl.col("kind") != int(Record.STATE)
    runs = rows.select("file", "line", "name", calls.alias("_call")).sort("file", "line", maintain_order=True)
    broken = (pl.col("name") != pl.col("name").shift(1)) | (pl.col("file") != pl.col("file").shift(1)) | ~pl.col("_call")
    runs = runs.with_columns(broken.fill_null(value=True).cum_sum().alias("_run")).filter("_call")
    longest = runs.group_by("_run").agg(pl.col("name").first(), pl.len()).group_by("name").agg(pl.col("len").max())
    return {int(name): int(n) for name, n in longest.iter_rows()}


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    """Whole batches of an Arrow stream.

    Raises:
        TraceError: it cannot be read, or has other columns.
    """
    batches: list[pa.RecordBatch] = []
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        with pa.OSFile(str(path), "rb") as source:
            reader = ipc.open_stream(source)
            if not reader.schema.equals(schema):
                raise TraceError(f"{path}: columns are not those of this version", hint="proctor import traincheck again")
            for batch in reader:
                batch.validate(full=True)
                batches.append(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"{path}: damaged ({str(error).splitlines()[0][:120]})", hint="proctor import traincheck again") from None
    return pa.Table.from_batches(batches, schema=schema)


def _parameters(path: Path) -> dict[str, list[Parameter]]:
    try:
        table = json.loads(read_file(path, MAX_PARAMETERS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {
        str(function): [(str(p[0]), str(p[1]), p[2]) for p in listed if isinstance(p, list) and len(p) == 3]
        for function, listed in table.items()
        if isinstance(listed, list)
    }


def _decode(text: str | None) -> Any:
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, (dict, list)) else {}


def within(times: np.ndarray[Any, Any], low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many of these sorted times lie strictly between each low and high."""
    counts: np.ndarray[Any, Any] = np.searchsorted(times, high, "left") - np.searchsorted(times, low, "right")
    return counts
