"""Views that are made with arrays say what plain queries over the same rows say."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.invariants.relations.views import frames, named, sightings
from proctor.invariants.schema import CallFlag, Name
from proctor.invariants.trace import Trace
from proctor.invariants.trace.merge import empty

FUNCTIONS = ["", sightings.CREATED, "torch.relu", "torch.randn"]
STEPS = st.sampled_from([-1, 0, 1, 2, 3])
CALLS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=30, unique_by=lambda c: c[:2])
SMALL = st.sampled_from([0, 1 << 16])  # a run is long, or short
ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 13), st.none() | STEPS), max_size=12)


def traced(calls: list[Any], steps: list[int]) -> Trace:
    """A trace of these calls (process, number, function, context, whether it raised) in contexts of these steps; later contexts are not known."""
    told = pl.DataFrame(calls, schema={"proc": pl.UInt16, "seq": pl.UInt32, "fn": pl.UInt32, "ctx": pl.UInt32, "raised": pl.Boolean}, orient="row")
    told = told.with_columns(pl.when("raised").then(int(CallFlag.RAISED)).otherwise(0).alias("flags"), (pl.col("seq") * 10).alias("site")).drop("raised")
    like = empty("calls")
    calls_ = pl.concat([like, told.select(pl.col(c).cast(t) if c in told.columns else pl.lit(0).cast(t).alias(c) for c, t in like.schema.items())])
    contexts = pl.DataFrame({"ctx": range(len(steps)), "step": steps, "phase": ["train"] * len(steps)}, schema={"ctx": pl.UInt32, "step": pl.Int32, "phase": pl.String})
    return Trace([], [], calls_, empty("states"), contexts, {Name.FUNCTION: FUNCTIONS})


@settings(max_examples=60, deadline=None)
@given(CALLS, st.lists(STEPS, max_size=5), SMALL)
def test_calls_of_functions(calls: list[Any], steps: list[int], small: int) -> None:
    trace = traced(calls, steps)
    with patch.object(named, "_SMALL", small):
        found = frames.calls_of(trace, r"torch\.relu", r"torch\.randn")
    steps_of = dict(enumerate(steps))
    wanted = [(proc, seq, steps_of.get(ctx)) for proc, seq, fn, ctx, raised in calls if fn > 1 and not raised]
    assert found.select("proc", "seq", "step").rows() == wanted


@settings(max_examples=60, deadline=None)
@given(CALLS, ROWS, SMALL)
def test_lines_of_rows(calls: list[Any], rows: list[Any], small: int) -> None:
    trace = traced(calls, [0])
    frame = pl.DataFrame(rows, schema={"proc": pl.UInt16, "seq": pl.UInt32, "step": pl.Int32}, orient="row")
    with patch.object(named, "_SMALL", small):
        found = sightings.sites(trace, frame)
    by = {(proc, seq): (seq * 10, FUNCTIONS[fn]) for proc, seq, fn, *_ in calls}
    assert found.select("site", "function").rows() == [by.get((proc, seq), (0, None)) for proc, seq, _ in rows]


@settings(max_examples=100, deadline=None)
@given(CALLS, st.lists(STEPS, max_size=5), ROWS)
def test_sessions_of_rows(calls: list[Any], steps: list[int], rows: list[Any]) -> None:
    trace = traced(calls, steps)
    frame = pl.DataFrame(rows, schema={"proc": pl.UInt16, "seq": pl.UInt32, "step": pl.Int32}, orient="row")
    made = sorted((proc, seq, steps[ctx] if ctx < len(steps) else None) for proc, seq, fn, ctx, raised in calls if fn == 1 and not raised)

    def session(proc: int, seq: int, step: int | None) -> int:
        mine = [(number, when) for of, number, when in made if of == proc]
        if seq > 0:
            return sum(number <= seq for number, _ in mine)
        nth = [(when, place) for place, (_, when) in enumerate(mine, 1) if when is not None and step is not None and when <= step]
        return max(nth)[1] if nth else 0

    assert sightings.with_session(trace, frame)["session"].to_list() == [session(*row) for row in rows]
