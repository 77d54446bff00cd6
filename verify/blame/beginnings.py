"""Why replicas do not begin equal, and why a buffer parts: the draw, the seed or the load that differs before the first update.

In: a `Scene` with a variable. Out: a `Cause`, or None where it began the same on all ranks, or records do not say.
"""

from __future__ import annotations

import polars as pl

from proctor.invariants.relations.views import frames
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.verdict import Cause
from proctor.verify.blame.scene import Call, Scene

_SEED = "torch.manual_seed"


def explain(scene: Scene) -> Cause | None:
    """The call to blame for a variable that differs before anything is trained."""
    trace, procs = scene.trace, list(scene.procs.values())
    mine = trace.variables.filter((pl.col("name") == scene.variable) & (pl.col("model") == scene.model) & (pl.col("attr") == "data"))
    first = frames.first_values(trace).filter(pl.col("proc").is_in(procs)).join(mine.select("var"), on="var", how="semi")
    first = first.filter(~frames.has(int(StateFlag.NONE | StateFlag.UNHASHED)))
    if first.height != len(procs) or first["fp"].n_unique() == 1:
        return None
    began = Scene(trace, -1, scene.procs, scene.odd, scene.variable, scene.model)
    draw = _first_draw_apart(began)
    said = f"{scene.variable} does not begin the same on all ranks"
    if draw is None:
        return None
    seeds = _seeds(began)
    if seeds:
        return Cause(f"{said}: {draw} draws something else on each, after {seeds[0]} was given other numbers by them, and nothing made it equal.", draw.blamed, draw.source)
    return Cause(f"{said}: {draw} draws something else on each, and nothing made it equal afterwards.", draw.blamed, draw.source)


def buffer(scene: Scene) -> Cause | None:
    """The call in which a buffer parts: of a module that makes it of its own rank's batch, most often."""
    call = scene.parting() if (scene.mine["role"] == "buffer").any() else None
    if call is None:
        return None
    text = f"The buffer {scene.variable} parts in {call}: each rank makes it of its own data, and nothing shares it before the step ends."
    return Cause(text, call.blamed, call.source)


def _first_draw_apart(began: Scene) -> Call | None:
    """The first random draw before training that is not the same on all ranks."""
    trace = began.trace
    rows = trace.values.filter((pl.col("kind") == int(Value.DRAW)) & (pl.col("fp") != 0) & pl.col("proc").is_in(list(began.procs.values())))
    rows = rows.join(trace.contexts.filter(pl.col("step") == -1).select("ctx"), on="ctx", how="semi").sort("proc", "seq")
    draws = {rank: rows.filter(pl.col("proc") == proc).select("fp", "seq").rows() for rank, proc in began.procs.items()}
    rank = began.odd[0]
    for k in range(min(map(len, draws.values()))):
        if len({d[k][0] for d in draws.values()}) > 1:
            return began.call(rank, draws[rank][k][1])
    return None


def _seeds(began: Scene) -> list[Call]:
    """Seedings that were given other numbers by the ranks."""
    rows = began.calls.filter(pl.col("fn") == _SEED)
    given = {rank: rows.filter(pl.col("rank") == rank).select("args", "seq").rows() for rank in began.procs}
    rank = began.odd[0]
    found = []
    for k in range(min(map(len, given.values()))):
        if len({g[k][0] for g in given.values()}) > 1:
            call = began.call(rank, given[rank][k][1])
            found += [call] if call is not None else []
    return found
