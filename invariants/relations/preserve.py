"""A call leaves the plain attributes of the modules that it is given as they were.

Catches a library that keeps notes of its own on the user's modules and overwrites the user's: DeepSpeed's set-up
replaced `id`, by which models were placed (DeepSpeed-6772). New attributes are nobody's loss and are not counted, nor
is what a module's own method does with itself. Source: ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.condition import FAMILY
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Relation, register
from proctor.invariants.schema import Name, Value
from proctor.invariants.trace import Trace

_MAX_SHOWN = 4
_MAX_KEPT = 8  # attributes of one call that count as examples
_CODES = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}


@register
class Preserve(Relation):
    """One hypothesis a function; examples are the attributes that its calls met: kept ones, or all that changed as one."""

    name = "preserve"
    code = "PR113"
    reads_signatures: ClassVar[bool] = False
    upstream = 1
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = 0

    def propose(self, trace: Trace) -> list[Hypothesis]:
        calls = _calls(trace)
        kept = calls.filter(pl.col("changed") == 0)["fn"].unique().sort().to_list()
        return [Hypothesis.of(self.name, fn=trace.functions[code]) for code in kept]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        fields = (FAMILY, "world")
        wanted = pl.DataFrame(
            {
                "fn": pl.Series([trace.function_code.get(h.text("fn"), 0) for h in hypotheses], dtype=pl.UInt32),
                "hyp": pl.Series(range(len(hypotheses)), dtype=pl.UInt32),
            }
        )
        frame = (
            _calls(trace)
            .join(wanted, on="fn", how="inner")
            .join(trace.families, on="proc", how="left")
            .join(trace.procs.select("proc", pl.col("world").cast(pl.String)), on="proc", how="left")
            .with_columns(
                (pl.col("changed") == 0).alias("passed"),
                pl.when(pl.col("changed") == 0).then(pl.col("_met").clip(1, _MAX_KEPT)).otherwise(1).alias("_n"),
            )
            .select(pl.all().exclude("_n").repeat_by(pl.col("_n").cast(pl.UInt32)))
            .explode("*")
            .select(*(pl.col(name).cast(dtype) for name, dtype in _CODES.items()), FAMILY, "world", "_paths", "_met")
            .sort("hyp", "proc", "seq")
        )
        return Examples(frame, fields, scope=(FAMILY,))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("fn")}), values=frozenset({"attribute"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{hypothesis['fn']} leaves the plain attributes of the modules that it is given as they were"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        shown = example["_paths"][:_MAX_SHOWN]
        more = len(example["_paths"]) - len(shown)
        told = ", ".join(_told(trace, place, meta) for place, meta in ((p["place"], p["meta"]) for p in shown))
        first = trace.places[shown[0]["place"]] if shown else ""
        return Detail(
            expected=f"{int(example['_met'])} attributes unchanged",
            seen=told + (f" and {more} more" if more else ""),
            function=hypothesis.text("fn"),
            variable=first,
            advice=f"look at where {hypothesis['fn']} assigns {first.rpartition('.')[2]!r}, and at who reads it later",
        )


def _told(trace: Trace, place: int, meta: int) -> str:
    try:
        facts = json.loads(trace.texts[Name.META][meta])
        return f"{trace.places[place]} was {facts['old']} and became {facts['new']}"
    except (ValueError, KeyError, TypeError):
        return f"{trace.places[place]} changed"


def _calls(trace: Trace) -> pl.DataFrame:
    """One row a call that was given modules: its function, and which attributes it changed."""
    rows = trace.values.filter(pl.col("kind") == int(Value.ATTRIBUTE))
    is_count = pl.col("place") == 0
    per_call = rows.group_by("proc", "seq", maintain_order=True).agg(
        pl.col("ctx").first(),
        pl.col("number").filter(is_count).first().alias("_met"),
        (~is_count).sum().alias("changed"),
        pl.struct("place", "meta").filter(~is_count).alias("_paths"),
    )
    return (
        per_call.drop_nulls("_met")
        .join(trace.calls.select("proc", "seq", "fn", "site"), on=("proc", "seq"), how="inner")
        .join(trace.contexts.select("ctx", "step"), on="ctx", how="left")
    )
