"""Surveys: what one shard says about which hypotheses there are, as a small table that merges.

A survey has texts instead of codes, so that tables of several shards mean the same. Columns named in a relation's
`folds` are combined where all other columns are equal; every fold is associative and commutative, so surveys may be
merged in any order and grouping.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec
import polars as pl

from proctor.invariants.invariant import Hypothesis

Fold = Literal["sum", "min", "max", "any", "all"]
HYPOTHESIS, BROKEN = "hypothesis", "broken"
PLAIN: Final[Mapping[str, Fold]] = {BROKEN: "any"}


def of_hypotheses(hypotheses: Sequence[Hypothesis], broken: Sequence[Hypothesis] = ()) -> pl.DataFrame:
    """The survey of a relation whose hypotheses are those of any shard, but for those that some shard breaks."""
    bad = {msgspec.json.encode(h).decode() for h in broken}
    texts = sorted({msgspec.json.encode(h).decode() for h in hypotheses} | bad)
    return pl.DataFrame(
        {HYPOTHESIS: pl.Series(texts, dtype=pl.String), BROKEN: pl.Series([t in bad for t in texts], dtype=pl.Boolean)}
    )


def hypotheses_of(survey: pl.DataFrame) -> list[Hypothesis]:
    if HYPOTHESIS not in survey.columns:
        return []
    whole = survey.filter(~pl.col(BROKEN))
    return [msgspec.json.decode(text, type=Hypothesis) for text in whole[HYPOTHESIS].to_list()]


def merge(surveys: Sequence[pl.DataFrame], folds: Mapping[str, Fold]) -> pl.DataFrame:
    """One survey of many: equal rows once, folded columns combined, sorted."""
    frames = [s for s in surveys if s.width]
    if not frames:
        return pl.DataFrame()
    both = pl.concat(frames, how="diagonal")
    keys = [c for c in both.columns if c not in folds]
    folded = [_fold(c, folds[c]) for c in both.columns if c in folds]
    merged = both.group_by(keys).agg(folded) if folded else both.unique()
    return merged.select(sorted(both.columns)).sort(sorted(keys))


def _fold(column: str, fold: Fold) -> pl.Expr:
    values = pl.col(column)
    match fold:
        case "sum":
            return values.sum()
        case "min":
            return values.min()
        case "max":
            return values.max()
        case "any":
            return values.any()
        case "all":
            return values.all()


def arrange(orders: Collection[Sequence[str]]) -> tuple[str, ...]:
    """One order of names that agrees with each of these, as far as they agree with each other.

    Where they leave a choice, and where they contradict each other, the name decides.
    """
    names = sorted({name for order in orders for name in order})
    later: dict[str, set[str]] = {name: set() for name in names}
    before = dict.fromkeys(names, 0)
    for order in orders:
        for one, next_ in pairwise(order):
            if next_ not in later[one]:
                later[one].add(next_)
                before[next_] += 1
    ready = [name for name in names if not before[name]]
    heapq.heapify(ready)
    arranged: dict[str, None] = {}
    while len(arranged) < len(names):
        # In a circle, the least of those that are left goes first.
        name = heapq.heappop(ready) if ready else min(n for n in names if n not in arranged)
        if name in arranged:
            continue
        arranged[name] = None
        for next_ in later[name]:
            before[next_] -= 1
            if not before[next_] and next_ not in arranged:
                heapq.heappush(ready, next_)
    return tuple(arranged)
