"""Calls that some ranks make in the step and others do not: of what moves or reduces anything, then of the program's own functions.

In: a `Scene`. Out: a `Cause`, or None where all ranks make the same calls.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.views import collectives
from proctor.invariants.verdict import Cause
from proctor.verify.blame.scene import BACKWARD, UPDATE, Scene
from proctor.verify.wording import count

_CLIPPING: Final = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_", "torch.amp.GradScaler.unscale_")
_MATTERS: Final = (collectives.FUNCTIONS, frozenset({UPDATE}), frozenset(BACKWARD[:1]), frozenset(_CLIPPING))  # the first kind that differs is told


def explain(scene: Scene) -> Cause | None:
    """The first call of the step that not all ranks make as often, of those that can make replicas part."""
    for kind in _MATTERS:
        found = _of_kind(scene, pl.col("fn").is_in(sorted(kind)))
        if found is not None:
            return found
    return None


def branches(scene: Scene) -> Cause | None:
    """The same of the program's own functions: evidence where nothing else is."""
    return _of_kind(scene, ~pl.col("fn").str.starts_with("torch.") & (pl.col("site") != ""))


def _of_kind(scene: Scene, which: pl.Expr) -> Cause | None:
    counted = scene.calls.filter(which).group_by("fn", "site", "rank").agg(pl.len().alias("times"), pl.col("seq").min())
    if counted.is_empty():
        return None
    by_line = counted.group_by("fn", "site").agg(
        pl.col("times").n_unique().alias("ways"), pl.len().alias("ranks"), pl.col("seq").min(), pl.col("rank"), pl.col("times")
    )
    apart = by_line.filter((pl.col("ways") > 1) | (pl.col("ranks") < len(scene.procs))).sort("seq", "fn", "site")
    for fn, ranks, times in apart.select("fn", "rank", "times").iter_rows():
        often = dict.fromkeys(scene.procs, 0) | dict(zip(ranks, times, strict=True))
        most, least = max(often.values()), min(often.values())
        here, there = (tuple(sorted(r for r, n in often.items() if n == wanted)) for wanted in (most, least))
        site = apart.filter(pl.col("fn") == fn)["site"][0]
        row = scene.calls.filter((pl.col("fn") == fn) & (pl.col("site") == site) & (pl.col("rank") == here[0])).row(0, named=True)
        call = scene.call(here[0], row["seq"])
        if call is None:
            continue
        verb = "calls" if len(here) == 1 else "call"
        fewer = count(least, 'time') if least else 'not at all'
        text = f"In step {scene.step} {scene.said(here)} {verb} {call} {count(most, 'time')}, and {scene.said(there)} {fewer}: look at what decides that."
        return Cause(text, call.blamed if fn.startswith("torch.") else fn, call.source)
    return None
