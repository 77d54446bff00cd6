"""Where the numbers of two runs part: the first step in which a value differs, and which values differ in it.

Values are matched by rank, step, variable and how often it was recorded in that step before. A value is compared by its fingerprint, bit for
bit: what is only rounding differs, too. That one run has a value that the other lacks counts as a difference where both have the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from proctor.invariants.trace import Run
from proctor.verify.compare import Parting

_MOST: Final = 25  # values that are listed
_OF_A_KIND: Final = 5  # of each kind
_KEY: Final = ["rank", "step", "what", "name", "nth"]
_WORDS: Final = {"data": "value of", "grad": "gradient of"}


@dataclass
class Numbers:
    """What `numbers_of` found; see `Comparison`."""

    partings: list[Parting] = field(default_factory=list)
    apart: int = 0
    values: int = 0
    steps: int = 0
    notes: list[str] = field(default_factory=list)


def numbers_of(first: Run, second: Run) -> Numbers:
    """Compare all values of the steps that both runs have."""
    ours, theirs = _values(first), _values(second)
    found = Numbers()
    if not ours.height or not theirs.height:
        found.notes.append("one of the runs has no values: nothing could be compared")
        return found
    for where, rows, others in (("first", ours, theirs), ("second", theirs, ours)):
        lacking = sorted(set(rows["rank"].unique()) - set(others["rank"].unique()))
        if lacking:
            found.notes.append(f"only the {where} run has rank {', '.join(map(str, lacking[:8]))}: not compared")
    # Steps that only one run has, or whose last look one run did not come to, are no difference of numbers.
    steps = ours.select("rank", "step").unique().join(theirs.select("rank", "step").unique(), on=["rank", "step"])
    ends = [rows.group_by("rank").agg(pl.col("step").max().alias("_end")) for rows in (ours, theirs)]
    end = pl.concat(ends).group_by("rank").agg(pl.col("_end").min(), pl.col("_end").n_unique().alias("_several"))
    steps = steps.join(end, on="rank").filter((pl.col("step") < pl.col("_end")) | (pl.col("_several") == 1)).select("rank", "step")
    kinds = ours.select("what").unique().join(theirs.select("what").unique(), on="what")
    if kinds.height < max(ours["what"].n_unique(), theirs["what"].n_unique()):
        found.notes.append("the runs were not recorded alike; only what both have was compared: " + ", ".join(sorted(kinds["what"])))
    a, b = (rows.join(steps, on=["rank", "step"], how="semi").join(kinds, on="what", how="semi") for rows in (ours, theirs))
    both = a.join(b, on=_KEY, how="full", coalesce=True, suffix="_2", nulls_equal=True)
    found.values, found.steps = both.height, steps["step"].filter(steps["step"] >= 0).n_unique()
    unequal = (pl.col("fp") != pl.col("fp_2")) | pl.col("fp").is_null() | pl.col("fp_2").is_null()
    numbers = pl.col("number").is_not_nan() & pl.col("number_2").is_not_nan() & (pl.col("number") != pl.col("number_2"))
    apart = both.filter(unequal.fill_null(value=True) | numbers.fill_null(value=False))
    if not apart.height:
        return found
    at = apart["step"].min()
    order = pl.coalesce("seq", "seq_2")
    here = apart.filter(pl.col("step") == at).with_columns(order.alias("_at")).sort("_at", "rank", maintain_order=True)
    found.apart = here.height
    places = _places(first)
    few = here.filter(pl.int_range(pl.len()).over("what") < _OF_A_KIND)  # one setting stands in many places
    for row in few.head(_MOST).iter_rows(named=True):
        found.partings.append(
            Parting(
                row["step"], row["rank"], row["what"], row["name"], _said(row, ""), _said(row, "_2"),
                places.get((row["rank"], row["call"] or 0), ""),
            )
        )  # fmt: skip
    return found


def _said(row: dict[str, object], suffix: str) -> str:
    """What is known of a value."""
    fp, norm, number = row[f"fp{suffix}"], row[f"norm{suffix}"], row[f"number{suffix}"]
    if fp is None:
        return "not there"
    if isinstance(number, float) and not math.isnan(number):
        return f"{number:.9g}"
    bits = f"{fp:016x}"
    return f"norm {norm:.8g} ({bits})" if isinstance(norm, float) and not math.isnan(norm) else bits


def _values(run: Run) -> pl.DataFrame:
    """States and values of a run in one table: `_KEY`, seq, call, fp, norm, number."""
    states = run.states.filter(pl.col("name") != "").select(
        "rank", "step",
        pl.col("attr").replace_strict(_WORDS, default="state of", return_dtype=pl.String).alias("what"),
        pl.when(pl.col("role") == "optimizer").then(pl.col("name") + " " + pl.col("attr")).otherwise(pl.col("name")).alias("name"),
        "seq", "call", "fp", pl.col("norm").cast(pl.Float64), pl.lit(math.nan).alias("number"),
    )  # fmt: skip
    kinds = {"batch": "batch", "number": "number", "draw": "random draw", "received": "result of a collective"}
    values = run.values.filter(pl.col("kind").is_in(list(kinds))).select(
        "rank", "step",
        pl.col("kind").replace_strict(kinds, return_dtype=pl.String).alias("what"),
        pl.when(pl.col("item") >= 0).then(pl.col("place") + "[" + pl.col("item").cast(pl.String) + "]").otherwise(pl.col("place")).alias("name"),
        "seq", pl.col("seq").alias("call"), "fp", pl.col("norm").cast(pl.Float64), "number",
    )  # fmt: skip
    both = pl.concat([states, values.cast({"seq": pl.UInt32, "call": pl.UInt32})]).filter(pl.col("step").is_not_null())
    return both.with_columns(pl.int_range(pl.len()).over("rank", "step", "what", "name").alias("nth"))


def _places(run: Run) -> dict[tuple[int, int], str]:
    """Function and line of each call, by rank and number."""
    calls = run.calls.select("rank", "seq", "fn", "site")
    return {(rank, seq): f"{fn}, {site}" if site else fn for rank, seq, fn, site in calls.iter_rows()}
