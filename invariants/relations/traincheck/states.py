"""What values an attribute of each variable had, and when."""

from __future__ import annotations

import re
from typing import Any, Final

import polars as pl

from proctor.invariants.relations.traincheck.records import Records
from proctor.invariants.relations.traincheck.values import identity

# TrainCheck tracks no values of these: properties, and addresses under their older name.
_NO_ATTRIBUTE: Final = re.compile(r"(is|has|can)_.*|.*_ML_DAIKON.*")
_COLUMNS: Final = {
    "var": pl.UInt32,
    "proc": pl.UInt16,
    "thread": pl.Int64,
    "step": pl.Int32,
    "seq": pl.UInt32,
    "name": pl.UInt32,
    "meta": pl.UInt32,
    "body": pl.UInt32,
    "time": pl.Int64,
    "value": pl.String,
    "before": pl.String,
    "start": pl.Int64,
    "end": pl.Int64,
}


def intervals(seen: Records, type_: str, attr: str) -> pl.DataFrame:
    """Spans of time over which an attribute of a variable of this type kept its value, by variable and time.

    Columns: var (number of the variable, by first appearance), value (as a text that is equal for equal values), before
    (the value of the span before, null in the first), start and end; and of the last record in the span: proc, thread,
    step, seq, name, meta, body, time. A span ends where the next begins, the last one with the trace. Empty where a
    variable of this type never has the attribute.
    """
    kept: dict[tuple[str, str], pl.DataFrame] = seen.__dict__.setdefault("_intervals", {})
    if (type_, attr) not in kept:
        kept[type_, attr] = _intervals(seen, type_, attr)
    return kept[type_, attr]


def _intervals(seen: Records, type_: str, attr: str) -> pl.DataFrame:
    nothing = pl.DataFrame(schema=_COLUMNS)
    if _NO_ATTRIBUTE.fullmatch(attr):
        return nothing
    states = variables(seen)
    states = states.filter(pl.col("_type") == type_)
    if states.is_empty():
        return nothing
    codes = states["body"].unique().to_list()
    parsed = seen.parse(codes)
    texts = [identity(parsed[c][attr]) if attr in parsed[c] else None for c in codes]
    values = pl.DataFrame({"body": pl.Series(codes, dtype=pl.UInt32), "value": pl.Series(texts, dtype=pl.String)})
    states = states.join(values, on="body", how="left", maintain_order="left")
    if states.group_by("var").agg(pl.col("value").is_not_null().any())["value"].all() is False:
        return nothing
    states = states.filter(pl.col("value").is_not_null()).sort("var", "time", maintain_order=True)
    changed = (pl.col("value") != pl.col("value").shift(1)) | (pl.col("var") != pl.col("var").shift(1))
    states = states.with_columns(changed.fill_null(value=True).cum_sum().alias("_span"))
    spans = states.group_by("_span", maintain_order=True).agg(
        pl.col("var", "proc", "thread", "step", "seq", "name", "meta", "body", "value").last(),
        pl.col("time").first().alias("start"),
        pl.col("time").last().alias("time"),
    )
    ends = pl.Series([int(e) for e in seen.end], dtype=pl.Int64)
    return spans.with_columns(
        pl.col("value").shift(1).over("var").alias("before"),
        pl.coalesce(pl.col("start").shift(-1).over("var"), ends.gather(spans["proc"])).alias("end"),
    ).select(*_COLUMNS)


def variables(seen: Records) -> pl.DataFrame:
    """States with the number (by first appearance) and type of their variable: var, _type."""
    kept: pl.DataFrame | None = seen.__dict__.get("_variables")
    if kept is not None:
        return kept
    parsed = seen.parse(seen.states["name"].unique().to_list())
    named: dict[int, Any] = {c: parsed[c] for c in seen.states["name"].unique().to_list()}
    known = pl.DataFrame(
        {
            "name": pl.Series(list(named), dtype=pl.UInt32),
            "_type": pl.Series([v[1] if isinstance(v, list) and len(v) == 2 else None for v in named.values()], dtype=pl.String),
            "_name": pl.Series([v[0] if isinstance(v, list) and len(v) == 2 else None for v in named.values()], dtype=pl.String),
        }
    )
    states = seen.states.join(known, on="name", how="inner", maintain_order="left")
    keys = ["proc", "_name", "_type"]
    first = states.sort("file", "line", maintain_order=True).unique(keys, keep="first", maintain_order=True)
    numbered = first.select(*keys, pl.int_range(pl.len(), dtype=pl.UInt32).alias("var"))
    kept = states.join(numbered, on=keys, how="inner", maintain_order="left")
    seen.__dict__["_variables"] = kept
    return kept
