"""Attributes of variables keep the same value while they live together, as TrainCheck means it.

Two variables are compared over every span of time in which both kept a value, if those spans overlap by more than a
hundredth. The precondition speaks of the last record in each span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.condition import Kind
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, register
from proctor.invariants.relations.traincheck.fields import agreement, columns
from proctor.invariants.relations.traincheck.records import Records
from proctor.invariants.relations.traincheck.rule import (
    TrainCheckRule,
    example_rows,
    met,
    precondition,
    short,
)
from proctor.invariants.relations.traincheck.states import intervals
from proctor.invariants.relations.traincheck.tables import CONTEXT_MANAGERS
from proctor.invariants.trace import Trace

_MIN_OVERLAP: Final = 0.01
_CHUNK: Final = 1_000_000  # pairs looked at at a time
Positions = np.ndarray[Any, Any]
MAX_EXAMPLES: Final = 100_000  # kept of one rule, of those that passed and of those that failed


@register
class Consistent(TrainCheckRule):
    """Attributes of two variables are equal while both keep their value."""

    name, code = "tc_consistent", "PR155"
    group = "var"
    upstream = 1

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        out = []
        for hyp, h in enumerate(hypotheses):
            left = intervals(seen, h.text("type"), h.text("attr"))
            right = intervals(seen, h.text("other_type"), h.text("other_attr"))
            if left.is_empty() or right.is_empty():
                continue
            runs = pl.Series([p.run for p in trace.processes], dtype=pl.UInt16)
            one = (h.text("type"), h.text("attr")) == (h.text("other_type"), h.text("other_attr"))
            sides = [left] if one else [left, right]
            spans = pl.concat(s.with_columns(pl.lit(i).alias("side")) for i, s in enumerate(sides))
            spans = spans.with_columns(runs.gather(spans["proc"]).alias("run"))
            out += _judged(seen, hyp, h, spans, one=one)
        return out

    def say(self, hypothesis: Hypothesis) -> str:
        a = f"{short(hypothesis.text('type'))}.{hypothesis.text('attr')}"
        b = f"{short(hypothesis.text('other_type'))}.{hypothesis.text('other_attr')}"
        return f"{a} is the same in two variables" if a == b else f"{a} of a variable equals {b} of another"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        names = [str(example.get(k) or "") for k in ("_first", "_second")]
        return Detail(
            expected=f"equal {hypothesis.text('attr')}",
            seen=f"{names[0]} and {names[1]} differ",
            variable=names[0],
            advice="compare how the two variables came by their values",
        )


def _judged(seen: Records, hyp: int, h: Hypothesis, spans: pl.DataFrame, *, one: bool) -> list[pl.DataFrame]:
    """Examples of one rule, at most `MAX_EXAMPLES` of each kind."""
    texts = columns(seen, spans, sorted(precondition(h).fields))
    managed = [f for f in texts.columns if f.startswith(CONTEXT_MANAGERS)]
    codes = spans["name"].unique().to_list()
    parsed = seen.parse(codes)
    names = {c: str(parsed[c][0]) for c in codes if isinstance(parsed[c], list) and len(parsed[c]) == 2}
    out: list[pl.DataFrame] = []
    kept = {True: 0, False: 0}
    for i, j in _pairs(spans, texts.select(_shared(h, texts.columns)), one=one):
        pairs = spans[i].select("proc", "step", "seq", pl.col("name").alias("_first"), pl.col("value").alias("_a"))
        pairs = pairs.with_columns(spans["name"][j].alias("_second"), spans["value"][j].alias("_b"))
        if texts.width:
            first = texts[i]
            second = texts[j].with_columns(first[f] for f in managed)  # they are asked of the first record only
            pairs = pl.concat([pairs, agreement(first, second)], how="horizontal")
        pairs = met(pairs, h).with_columns((pl.col("_a") == pl.col("_b")).alias("_same")).drop("_a", "_b")
        for passed in (False, True):
            rows = pairs.filter(pl.col("_same") == passed).drop("_same").head(MAX_EXAMPLES - kept[passed])
            kept[passed] += rows.height
            rows = rows.with_columns(_named(rows[c], names) for c in ("_first", "_second"))
            out.append(example_rows(hyp, h, rows, [passed] * rows.height))
    return out


def _named(codes: pl.Series, names: Mapping[int, str]) -> pl.Series:
    return pl.Series(codes.name, [names.get(c, "") for c in codes.to_list()], dtype=pl.String)


def _shared(h: Hypothesis, known: Sequence[str]) -> list[str]:
    """Fields on which the two records of any example that meets the precondition agree."""
    when = precondition(h)
    if when.inverted or not when.any_of:
        return []
    agreed = [{c.field for c in clause if c.kind in (Kind.CONSTANT, Kind.CONSISTENT)} for clause in when.any_of]
    return sorted(f for f in set.intersection(*agreed) if f in known and not f.startswith(CONTEXT_MANAGERS))


def _pairs(spans: pl.DataFrame, shared: pl.DataFrame, *, one: bool) -> Iterator[tuple[Positions, Positions]]:
    """Positions of spans of two variables that overlap and share these texts, in chunks; the rule's first side first."""
    keyed = spans.select("run", "start", "end").with_row_index("row")
    keyed = pl.concat([keyed, shared], how="horizontal").drop_nulls() if shared.width else keyed
    if keyed.is_empty():
        return
    keyed = keyed.with_columns(pl.struct("run", *shared.columns).rank("dense").alias("group")).sort("group", "start")
    row, group = keyed["row"].to_numpy(), keyed["group"].to_numpy().astype(np.int64)
    start, end = keyed["start"].to_numpy(), keyed["end"].to_numpy()
    # Of each span, the later ones of its group that begin before it ends; times as ranks, so that keys stay small.
    times = np.unique(start)
    width = len(times) + 1
    last = np.searchsorted(
        group * width + np.searchsorted(times, start), group * width + np.searchsorted(times, end), "left"
    )
    order = np.arange(len(row))
    count = np.maximum(last - order - 1, 0)
    var, side = spans["var"].to_numpy(), spans["side"].to_numpy()
    for low, high in _chunks(count):
        n = count[low:high]
        a = np.repeat(order[low:high], n)
        b = a + 1 + np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        both = np.minimum(end[a], end[b]) - np.maximum(start[a], start[b])
        either = np.maximum(end[a], end[b]) - np.minimum(start[a], start[b])
        i, j = row[a], row[b]
        keep = (both > _MIN_OVERLAP * either) & (var[i] != var[j])
        if not one:
            keep &= side[i] != side[j]
        i, j = i[keep], j[keep]
        swap = (var[i] > var[j]) if one else (side[i] > side[j])
        yield np.where(swap, j, i), np.where(swap, i, j)


def _chunks(count: Positions) -> Iterator[tuple[int, int]]:
    """Ranges of spans with about `_CHUNK` pairs each."""
    sums = np.cumsum(count)
    low = 0
    while low < len(count):
        before = sums[low - 1] if low else 0
        high = max(int(np.searchsorted(sums, before + _CHUNK, "right")), low + 1)
        yield low, high
        low = high
