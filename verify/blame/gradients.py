"""Why a gradient is not the same on all ranks when it is used: who wrote it last, and which reduction it did not get.

In: a `Scene` with a parameter. Out: a `Cause`, or None where the gradient is the same on all ranks, or records do not say. What is absent is told of only
where it would have been recorded.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.codec import collective
from proctor.invariants.relations.views import collectives
from proctor.invariants.verdict import Cause
from proctor.verify.blame.scene import BACKWARD, REPLICATED, Call, Scene
from proctor.verify.wording import count

_REDUCTIONS: Final = tuple(f"torch.distributed.{n}" for n in (
    "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather", "all_reduce_coalesced", "reduce", "broadcast",
))  # fmt: skip
_MOST: Final = 64  # other gradients looked at
_FORWARD: Final = f"{REPLICATED}.forward"
_NO_SYNC: Final = f"{REPLICATED}.no_sync"


def explain(scene: Scene) -> Cause | None:
    """The call to blame for a gradient that parts."""
    values = scene.gradients(scene.model, scene.variable)
    number = {len(rows) for rows in values.values()}
    if len(number) != 1 or not scene.variable or 0 in number:
        return None
    equal = [len({rows[k][0] for rows in values.values()}) == 1 for k in range(number.pop())]
    if equal[-1]:
        return None
    rank = scene.odd[0]
    since = len(equal) - equal[::-1].index(True) if True in equal else 0  # the first value of those that part to the end
    writer = scene.call(rank, values[rank][since][1])
    if writer is None:
        return None
    if since:
        return _parted_later(scene, writer, scene.call(rank, values[rank][since - 1][1]))
    return _never_equal(scene, writer, scene.call(rank, values[rank][-1][1]) or writer)


def _parted_later(scene: Scene, writer: Call, before: Call | None) -> Cause | None:
    """It was the same on all ranks for some time in the step."""
    gradient = f"{scene.variable}.grad"
    held = f"{gradient} is the same on all ranks after {before}" if before else f"{gradient} is the same on all ranks before that"
    if writer.function in BACKWARD:
        paused = _paused(scene, writer, before)
        if paused is not None:
            text = f"{held}, and parts in {writer}, whose forward runs under {paused}: what it adds is not averaged before the update."
            return _of(paused, text)
        return _of(writer, f"{held}, and parts in {writer}: what that backward adds is not averaged over the ranks before the update.")
    return _of(writer, f"{held}, and is changed differently by the ranks in {writer}.")


def _never_equal(scene: Scene, writer: Call, last: Call) -> Cause | None:
    """No value of it in the step is the same on all ranks."""
    gradient = f"{scene.variable}.grad"
    if (partial := _partial(scene, gradient)) is not None:
        return partial
    if (left_out := _left_out(scene, gradient)) is not None:
        return left_out
    wrapped = (scene.sent["fn"] == collectives.DDP).any()
    if wrapped and (bypassed := _bypassed(scene, writer)) is not None:
        return bypassed
    if wrapped and (paused := _paused(scene, last, None)) is not None:
        return _of(paused, f"{gradient} parts in {last}, whose forward runs under {paused}: no backward of the step averages it over the ranks.")
    others = _equal_elsewhere(scene)
    if others:
        return _alone(scene, gradient, writer, others, wrapped=bool(wrapped))
    reductions = scene.calls.filter(pl.col("fn").is_in(_REDUCTIONS))
    if not wrapped and reductions.is_empty() and all(map(scene.observed, _REDUCTIONS[:3])):
        return _of(writer, f"{gradient} is each rank's own from {writer}, and no collective of the step averages gradients before the update.")
    return None


def _partial(scene: Scene, gradient: str) -> Cause | None:
    """It is reduced, and not over all these ranks."""
    mine = scene.sent.filter(pl.col("variable") == gradient)
    if mine.is_empty():
        return None
    rank, seq, members = mine.select("rank", "seq", "members").row(0)
    call, among = scene.call(rank, seq), set(collective.ranks_of(members))
    outside = tuple(r for r in sorted(scene.procs) if r not in among)
    if call is None or not outside:
        return None
    return _of(call, f"{gradient} is given to {call}, on a group of {scene.said(tuple(sorted(among)))} alone: {scene.said(outside)} {_verb(outside, 'is', 'are')} not in it.")


def _left_out(scene: Scene, gradient: str) -> Cause | None:
    """Gradients of other parameters are given to a reduction, and this one is not."""
    given = scene.sent.filter(pl.col("variable").str.ends_with(".grad") & pl.col("fn").is_in([name.rpartition(".")[2] for name in _REDUCTIONS]))
    others = given["variable"].unique()
    if others.is_empty() or gradient in others:
        return None
    rank, seq = given.filter(pl.col("rank") == scene.odd[0]).select("rank", "seq").row(0) if (given["rank"] == scene.odd[0]).any() else given.select("rank", "seq").row(0)
    call = scene.call(rank, seq)
    if call is None:
        return None
    which = "" if len(others) > 3 else f" ({', '.join(sorted(others))})"
    return _of(call, f"{call} is given {count(len(others), 'other gradient')}{which} in this step, and {gradient} is given to none on any rank.")


def _bypassed(scene: Scene, writer: Call) -> Cause | None:
    """A model is wrapped, and its forward does not go through the wrapper."""
    if scene.calls.filter(pl.col("fn") == _FORWARD).height:
        return None  # an outermost call of a model is recorded as such whatever encloses it, so its being outermost shows that no wrapper does
    root = next((one for one in reversed(scene.roots(writer.rank)) if one.seq < writer.seq), None)
    if root is None:
        return None
    text = f"{root} calls the module itself: a model is in DistributedDataParallel, whose forward no rank calls in this step, so its backward averages no gradient."
    return Cause(text, root.function, root.source)


def _paused(scene: Scene, backward: Call, since: Call | None) -> Call | None:
    """The `no_sync` that a backward, or the forward that it belongs to, runs under, if there is one after the backward before it."""
    found = scene.last(backward.rank, _NO_SYNC, before=backward.seq)
    earlier = scene.last(backward.rank, BACKWARD[0], before=backward.seq) if since is None else since
    if found is None or (earlier is not None and earlier.seq > found.seq):
        return None
    return found


def _equal_elsewhere(scene: Scene) -> dict[str, Call]:
    """Parameters whose gradients are the same on all ranks when they are used, each with the call that wrote its last value."""
    others = (pl.col("attr") == "grad") & ~((pl.col("name") == scene.variable) & (pl.col("model") == scene.model))
    found = {}
    for model, name in scene.states.filter(others).select("model", "name").unique(maintain_order=True).head(_MOST).iter_rows():
        values = scene.gradients(model, name)
        lasts = {rows[-1][0] if rows else None for rows in values.values()}
        call = scene.call(scene.odd[0], values[scene.odd[0]][-1][1]) if len(lasts) == 1 and None not in lasts else None
        if call is not None:
            found[name] = call
    return found


def _alone(scene: Scene, gradient: str, writer: Call, others: dict[str, Call], *, wrapped: bool) -> Cause:
    """Gradients of other parameters are the same on all ranks."""
    how = f"{count(len(others), 'other gradient')} {_verb(others, 'is', 'are')} the same on all ranks"
    elsewhere = [call for call in others.values() if (call.function, call.source) != (writer.function, writer.source)]
    if writer.function in BACKWARD and len(elsewhere) == len(others):
        return _of(writer, f"{gradient} comes from {writer} and no reduction follows before it is used, while {how}, after {elsewhere[0]}.")
    if wrapped:
        text = f"{how} after {next(iter(others.values()))}, and {gradient}, from the same backward, is not: DistributedDataParallel does not hold this parameter, or ignores it."
        return Cause(text, REPLICATED, writer.source)
    return _of(writer, f"{how} when it is used, and {gradient}, last written by {writer}, is not: no reduction of it is seen.")


def _verb(several: tuple[int, ...] | dict[str, Call], one: str, many: str) -> str:
    return one if len(several) == 1 else many


def _of(call: Call, text: str) -> Cause:
    return Cause(text, call.blamed, call.source)


