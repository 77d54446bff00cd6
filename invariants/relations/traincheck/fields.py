"""Columns that preconditions of imported rules speak of: texts of fields of TrainCheck's records.

A field is a flattened name of a record, such as `meta_vars.stage` or `attributes.ndim`. Of context managers that were
entered, `meta_vars.context_managers.<class>` is set while one is active, and `….<class>.<argument>` is what it was
made with. These are not recorded; they follow from the calls of `__init__`, `__enter__` and `__exit__` of one object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl

from proctor.invariants.relations.traincheck.records import Records
from proctor.invariants.relations.traincheck.tables import CONTEXT_MANAGERS, STAGE, Record
from proctor.invariants.relations.traincheck.values import text_of

ACTIVE: Final = "active"  # text of the field of a context manager
DIFFERS: Final = "differs"  # text of a field that all records of an example have, but do not share
# Their objects are not made by a recorded `__init__`.
_NO_MANAGERS: Final = ("torch.autograd.grad_mode", "torch.autograd.profiler.record_function")
_ENTER: Final = ".__enter__"
_ATTRIBUTES: Final = "attributes."


class Active(NamedTuple):
    """A context manager while it was active."""

    name: str
    proc: int
    thread: int
    start: int
    end: int
    given: Mapping[str, str | None]  # arguments as texts


def columns(records: Records, rows: pl.DataFrame, names: Collection[str]) -> pl.DataFrame:
    """Texts of these fields for these calls or states, in their order; null where a record does not have one."""
    frame = pl.DataFrame({name: _column(records, rows, name) for name in names})
    managed = [n for n in names if n.startswith(CONTEXT_MANAGERS)]
    return _with_managers(records, rows, frame, managed) if managed and rows.height else frame


def _column(records: Records, rows: pl.DataFrame, name: str) -> pl.Series:
    match name:
        case "process_id":
            pids = pl.Series([str(pid) for pid in records.pids], dtype=pl.String)
            return pids.gather(rows["proc"]) if rows.height else pl.Series([], dtype=pl.String)
        case "thread_id":
            return rows["thread"].cast(pl.String)
        case "obj_id":
            known = rows["obj"] if "obj" in rows.columns else pl.Series([None] * rows.height, dtype=pl.Int64)
            return known.cast(pl.String).fill_null("null")
        case "function":
            return _mapped(rows["name"], {code: text_of(text) for code, text in records.names.items()})
        case "var_name" | "var_type":
            return _looked_up(records, rows["name"], 0 if name == "var_name" else 1)
    if name.startswith(_ATTRIBUTES):
        codes = rows["body"] if "body" in rows.columns else pl.Series([0] * rows.height, dtype=pl.UInt32)
        return _looked_up(records, codes, name.removeprefix(_ATTRIBUTES))
    column = _looked_up(records, rows["meta"], name)
    return column.fill_null(text_of("init")) if name == STAGE and records.staged else column


def agreement(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    """Fields of examples of two records each: the shared text, and `<field>~`, null where one of them lacks it."""
    out = []
    for name in first.columns:
        a, b = first[name], second[name]
        known = a.is_not_null() & b.is_not_null()
        same = pl.Series((a == b).fill_null(value=False))
        pair = pl.DataFrame({"a": a, "known": known, "same": same})
        out.append(
            pair.select(
                pl.when("known").then(pl.when("same").then("a").otherwise(pl.lit(DIFFERS))).alias(name),
                pl.when("known").then("same").alias(f"{name}~"),
            )
        )
    return pl.concat(out, how="horizontal") if out else pl.DataFrame()


def agreement_of_all(records: pl.DataFrame) -> dict[str, str | bool | None]:
    """Fields of one example of many records: the shared text, and whether they agree (true) or all differ (false)."""
    out: dict[str, str | bool | None] = {}
    for name in records.columns:
        column = records[name]
        known = column.null_count() == 0 and column.len() > 0
        distinct = column.n_unique() if known else 0
        out[name] = (column[0] if distinct == 1 else DIFFERS) if known else None
        out[f"{name}~"] = (True if distinct == 1 else False if distinct == column.len() else None) if known else None
    return out


def _mapped(codes: pl.Series, texts: Mapping[int, str | None]) -> pl.Series:
    known = list(texts)
    if not known:
        return pl.Series([None] * codes.len(), dtype=pl.String)
    return codes.replace_strict(known, [texts[c] for c in known], default=None, return_dtype=pl.String)


def _looked_up(records: Records, codes: pl.Series, key: str | int) -> pl.Series:
    """Texts of one member of the decoded texts of these codes: of an object by name, of a list by place."""
    wanted = codes.unique().to_list()
    parsed = records.parse(wanted)
    kind = dict if isinstance(key, str) else list
    found = {}
    for code in wanted:
        tree = parsed[code]
        known = isinstance(tree, kind) and (key in tree if isinstance(key, str) else key < len(tree))
        found[code] = text_of(tree[key]) if known else None
    return _mapped(codes, found)


def _with_managers(records: Records, rows: pl.DataFrame, frame: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    time = rows["t0" if "t0" in rows.columns else "time"].to_numpy()
    proc, thread = rows["proc"].to_numpy(), rows["thread"].to_numpy()
    texts: dict[str, np.ndarray[Any, Any]] = {n: np.array(frame[n].to_list(), dtype=object) for n in names}
    for active in managers(records):
        base = CONTEXT_MANAGERS + active.name
        mine = [n for n in names if n == base or n.startswith(base + ".")]
        if not mine:
            continue
        inside = (proc == active.proc) & (thread == active.thread) & (time >= active.start) & (time <= active.end)
        for name in mine:
            texts[name][inside] = ACTIVE if name == base else active.given.get(name.removeprefix(base + "."))
    return frame.with_columns(pl.Series(n, values.tolist(), dtype=pl.String) for n, values in texts.items())


def managers(records: Records) -> list[Active]:
    """Every use of a context manager whose making, entering and leaving were recorded."""
    kept: list[Active] | None = records.__dict__.get("_managers")
    if kept is None:
        kept = records.__dict__["_managers"] = _find_managers(records)
    return kept


def _find_managers(records: Records) -> list[Active]:
    found = []
    entered = sorted(n for n in records.codes if "__enter__" in n and not any(skip in n for skip in _NO_MANAGERS))
    for name in (n.removesuffix(_ENTER) for n in entered):
        init = f"{name}.__init__"
        returned = records.calls_of(name + _ENTER).filter(pl.col("status") == int(Record.POST))
        starts = _times_by_object(returned, "t1")
        ends = _times_by_object(records.calls_of(f"{name}.__exit__"), "t0")
        made = records.calls_of(init)
        parsed = records.parse(made["args"].to_list())
        for proc, thread, obj, time, args in made.select("proc", "thread", "obj", "t0", "args").iter_rows():
            start = _after(starts.get((proc, thread, obj)), time)
            end = _after(ends.get((proc, thread, obj)), start)
            if obj is None or start is None or end is None:
                continue
            given = records.arguments(init, parsed[args], defaults=bool(parsed[args].get("args") is not None))
            found.append(Active(name, proc, thread, start, end, {k: text_of(_plain(v)) for k, v in given.items()}))
    return found


def _times_by_object(calls: pl.DataFrame, column: str) -> dict[tuple[int, int, int], list[int]]:
    grouped = calls.sort(column).group_by("proc", "thread", "obj").agg(pl.col(column))
    return {(proc, thread, obj): times for proc, thread, obj, times in grouped.iter_rows()}


def _after(times: list[int] | None, time: int | None) -> int | None:
    if times is None or time is None:
        return None
    at = bisect_right(times, time)
    return times[at] if at < len(times) else None


def _plain(typed: Any) -> Any:
    """The value of `{type: value}`."""
    return next(iter(typed.values()), None) if isinstance(typed, dict) else typed
