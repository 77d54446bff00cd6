"""Why a parameter parts although its gradient is the same on all ranks: the option, the state or the call that differs between them.

In: a `Scene` with a parameter. Out: a `Cause`, or None where the records do not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames
from proctor.invariants.schema import Value
from proctor.invariants.verdict import Cause
from proctor.verify.blame.scene import UPDATE, Call, Scene
from proctor.verify.wording import short_name

_SCHEDULED: Final = r"torch\.optim\.lr_scheduler\.\w+\.step"


def explain(scene: Scene) -> Cause | None:
    """The call to blame for a parameter that parts in the step of its update, or outside of it."""
    if not scene.variable:
        return None
    rank = scene.odd[0]
    changed = scene.parting()
    if changed is not None and changed.function != UPDATE:
        return Cause(f"{scene.variable} parts in {changed}, outside of its optimizer's update.", changed.blamed, changed.source)
    update = changed or scene.last(rank, UPDATE)
    return None if update is None else _by_option(scene, update) or _by_state(scene, update)


def _by_option(scene: Scene, update: Call) -> Cause | None:
    """An option of the optimizer is not the same on all ranks, and who set it."""
    trace = scene.trace
    rows = trace.values.filter((pl.col("kind") == int(Value.OPTION)) & pl.col("proc").is_in(list(scene.procs.values())))
    rows = rows.join(trace.contexts.select("ctx", "step"), on="ctx").filter(pl.col("step") <= scene.step)
    rows = rows.join(frames.metas(trace, "when"), on="meta", how="left").filter(pl.col("when") == "update")
    rows = rows.join(trace.calls.select("proc", "seq", "args"), on=["proc", "seq"], how="left")
    optimizer = frames.arguments(trace, rows["args"], optimizer="0.name")
    rows = rows.join(optimizer, on="args", how="left").sort("proc", "seq")
    # All groups of an option are told again when one of them changes: what was said last holds.
    last = rows.group_by("proc", "optimizer", "place", "item", maintain_order=True).agg(pl.col("number").last(), pl.col("seq").last())
    rank_of = {proc: rank for rank, proc in scene.procs.items()}
    told: dict[tuple[str, int, int], dict[int, float]] = {}
    for proc, name, place, item, number in last.select("proc", "optimizer", "place", "item", "number").iter_rows():
        told.setdefault((str(name), place, item), {})[rank_of[proc]] = number
    for (_, place, group), by_rank in sorted(told.items()):
        if len(by_rank) == len(scene.procs) and len(set(by_rank.values())) > 1:
            option = trace.places[place]
            said = f"The gradient of {scene.variable} is the same on all ranks, and {option} of group {group} is {each(by_rank)} in {update}"
            setter = _scheduled(scene, update) if option == "lr" else None
            if setter is None:
                return Cause(f"{said}.", update.blamed, update.source)
            call, given = setter
            text = f"{said}; it was set last by {call}{f', which was given {given}: a number of each rank alone' if given else ''}."
            return Cause(text, call.function, call.source)
    return None


def _scheduled(scene: Scene, update: Call) -> tuple[Call, str] | None:
    """The last step of a scheduler before an update, and what it was given where ranks gave it different numbers ("" where not)."""
    trace = scene.trace
    names = frames.functions_like(trace, [_SCHEDULED])["fn"]
    rows = trace.calls.filter(pl.col("proc").is_in(list(scene.procs.values())) & pl.col("fn").is_in(names.implode())).sort("proc", "seq")
    rows = rows.join(trace.contexts.select("ctx", "step"), on="ctx")
    latest = {}
    for rank, proc in scene.procs.items():
        # In the step of this update, those after it have no part in it.
        mine = rows.filter((pl.col("proc") == proc) & (pl.col("step") <= scene.step))
        limit = scene.last(rank, UPDATE)
        mine = mine.filter(pl.col("seq") < limit.seq) if limit is not None else mine
        if mine.is_empty():
            return None
        latest[rank] = mine.tail(1).row(0, named=True)
    row = latest[update.rank]
    told = {rank: trace.features[one["args"]] for rank, one in latest.items()}
    kind = told[update.rank].get("0.type")
    function = f"{kind}.step" if isinstance(kind, str) else trace.functions[row["fn"]]
    call = Call(update.rank, row["seq"], function, "", trace.sites[row["site"]])
    given = {rank: features.get("1.value") for rank, features in told.items()}
    numbers = {rank: number for rank, number in given.items() if isinstance(number, (int, float)) and not isinstance(number, bool)}
    return call, each(numbers) if len(numbers) == len(scene.procs) and len(set(numbers.values())) > 1 else ""


def each(numbers: Mapping[int, float]) -> str:
    """`0.3 on rank 0 and 0.6 on rank 1`: of the first four."""
    return " and ".join(f"{number:.6g} on rank {rank}" for rank, number in sorted(numbers.items())[:4])


def _by_state(scene: Scene, update: Call) -> Cause | None:
    """What the optimizer remembers of the parameter parts in an earlier step than the parameter does, or with it."""
    trace = scene.trace
    about = trace.variables.filter((pl.col("name") == scene.variable) & ~pl.col("attr").is_in(["data", "grad"]) & (pl.col("role") != "buffer"))
    rows = trace.states.join(about.select("var", "attr"), on="var", how="inner")
    rows = rows.filter(pl.col("proc").is_in(list(scene.procs.values()))).join(trace.contexts.select("ctx", "step"), on="ctx")
    last = rows.sort("seq").group_by("attr", "step", "proc").agg(pl.col("fp").last())
    parted = last.group_by("attr", "step").agg(pl.col("fp").n_unique().alias("n"), pl.len().alias("held"))
    parted = parted.filter((pl.col("held") == len(scene.procs)) & (pl.col("n") > 1) & (pl.col("step") < scene.step)).sort("step", "attr")
    if parted.is_empty():
        return None
    attr, step = parted.select("attr", "step").row(0)
    text = f"What {short_name(update.function)} remembers of {scene.variable} ({attr}) differs between the ranks from step {step} on, before the parameter does."
    return Cause(text, update.blamed, update.source)
