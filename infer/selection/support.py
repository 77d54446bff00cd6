"""How many examples of each run support a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from proctor.infer.preconditions import Outcome
from proctor.infer.preconditions.compress import COUNT
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import RunSupport
from proctor.invariants.relations import Examples


def by_run(examples: Examples, outcomes: Mapping[int, Outcome], runs: Sequence[str]) -> dict[int, tuple[RunSupport, ...]]:
    """Passing examples that meet the precondition, and failing ones, by hypothesis and run.

    Args:
        examples: counted, with the run as `proc`.
        outcomes: hypotheses without a precondition are left out.
        runs: id of each run.
    """
    rules = {h: o.precondition for h, o in outcomes.items() if o.precondition is not None}
    frame = examples.frame.filter(pl.col("hyp").is_in(list(rules)))
    columns = frozenset(frame.columns)
    alike: dict[Precondition, list[int]] = {}
    for hyp, precondition in rules.items():
        if outcomes[hyp].excluded:
            alike.setdefault(precondition, []).append(hyp)
    disputed = [h for hyps in alike.values() for h in hyps]
    parts = [frame.filter(~pl.col("hyp").is_in(disputed)).select("hyp", "passed", "proc", COUNT)]
    for precondition, hyps in alike.items():
        mine = frame.filter(pl.col("hyp").is_in(hyps)).filter(~pl.col("passed") | precondition.holds(columns))
        parts.append(mine.select("hyp", "passed", "proc", COUNT))
    size = pl.col(COUNT).cast(pl.Int64)
    counts = (
        pl.concat(parts)
        .group_by("hyp", "proc")
        .agg(size.filter("passed").sum().alias("good"), size.filter(~pl.col("passed")).sum().alias("bad"))
        .sort("hyp", "proc")
    )
    found: dict[int, dict[str, RunSupport]] = {}
    for hyp, run, good, bad in counts.iter_rows():
        of = found.setdefault(hyp, {})
        held = of.get(runs[run], RunSupport(runs[run], 0))  # copies of one run are one
        of[runs[run]] = RunSupport(runs[run], held.passed + good, held.excluded + bad)
    return {hyp: tuple(of[k] for k in sorted(of)) for hyp, of in found.items()}
