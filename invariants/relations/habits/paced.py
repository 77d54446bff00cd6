"""A learning-rate schedule keeps the pace of its optimizer: one step of the scheduler for each update.

Held by programs all of whose runs keep it. `moves` and `rests` look at the options themselves, at the first updates of a pass over the
data, whoever sets them: an option that moves with each update does so in every run, and one that rests rests. `falls` and `peaks` look at the course of an option: one that only
falls once it has fallen does not go back to where it began, and one that falls behind its warmup does not stay there. Catches a scheduler that
is stepped for each microbatch, twice in an update (by the loop and by a library), by one rank more than by others, for each batch
where it counts epochs, or not at all although others are, and a rate that is computed and never set. Source: ours; `sequence` (PR103) says only
that a scheduler is stepped in a step, not which one and how often.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.fresh import batches as _fresh_batches
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.calls import ENOUGH
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import PROLOGUE

_SCHEDULE: Final = "torch.optim.lr_scheduler.LRScheduler.step"
_PASS: Final = "torch.utils.data.DataLoader.__iter__"
_LEAST: Final = 4  # steps in which it was kept
_MODE: Final = "once"
_AT_MOST: Final = "single"
_EPOCH: Final = "epoch"
_SAYS: Final = {
    "moves": "{option} of {kind} moves with each of the first updates",
    "rests": "{option} of {kind} rests in the first updates of a pass over the data",
    "falls": "{option} of {kind} does not rise again once it has fallen",
    "peaks": "{option} of {kind} falls as soon as it has stopped rising",
}
_FLAT: Final = 4  # updates behind a rise without a change
_LOOKS: Final = 4  # at the options of an optimizer: what `instrument/probes/options.py` tells of its first updates


@register
class Paced(Relation):
    """A scheduler steps once for each update."""

    name = "paced"
    code = "PR118"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 3
    reach: ClassVar[int | None] = 0
    reads: ClassVar[Reads] = "calls"
    alone: ClassVar[bool] = True
    absence: ClassVar[bool] = True

    def implies(self, a: Hypothesis, b: Hypothesis) -> bool:
        return a["mode"] == _MODE and b["mode"] == _AT_MOST and (a["what"], a["family"]) == (b["what"], b["family"])

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        return "numbers" if hypothesis["mode"] in _SAYS else self.reads

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        found, options = _every(trace), pl.col("mode").is_in([*_SAYS])
        return self.merge([_habits.survey(self.name, found.filter(~options & (~_once_a_pass(trace) | pl.col("mode").is_in([_AT_MOST, _EPOCH]))), _LEAST), _habits.survey(self.name, found.filter(options & (pl.col("mode") != "peaks")), _LOOKS - 1), _habits.survey(self.name, found.filter(pl.col("mode") == "peaks"), 1)])

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _every(trace), hypotheses)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["mode"] in _SAYS:
            return Needs(frozenset({_frames.UPDATE, _PASS}), values=frozenset({"option"}))
        return Needs(frozenset({_frames.UPDATE, _SCHEDULE, _PASS, *_fresh_batches.LOOP}))

    def say(self, hypothesis: Hypothesis) -> str:
        if hypothesis["mode"] in _SAYS:
            option, _, kind = hypothesis.text("what").partition(" of ")
            return _SAYS[hypothesis.text("mode")].format(option=option, kind=kind) + _habits.of_programs(hypothesis)
        kind, _, ranks = hypothesis.text("what").partition(", ")
        where = f" of a job of {ranks}" if ranks else ""
        if hypothesis["mode"] == _EPOCH:
            return f"a scheduler {kind.rpartition('.')[2]} steps from one pass over the data to the next" + _habits.of_programs(hypothesis)
        often = "at most once" if hypothesis["mode"] == _AT_MOST else "once"
        return f"a scheduler {kind.rpartition('.')[2]}{where} steps {often} for each update of its optimizer" + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=example["_expected"] or "",
            seen=example["_seen"] or "",
            function=_frames.UPDATE if hypothesis["mode"] in _SAYS else _SCHEDULE,
            variable=example["_variable"] or "",
            advice="Look at what sets this option in param_groups, and how often." if hypothesis["mode"] in _SAYS else "Look at where scheduler.step() is called: once behind optimizer.step(), in the same branch, and not by a library as well.",
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "paced", {"once": _once, "single": _single, "epoch": epochs, "options": _options, "course": _course})


def _once_a_pass(trace: Trace) -> pl.Expr:
    """Rows of processes in which a pass over the data is one update: a scheduler that steps once an epoch looks like one that steps
    once an update."""
    passes = _frames.calls_of(trace, re.escape(_PASS)).group_by("proc").len("passes")
    updates = _frames.updates(trace).group_by("proc").len("updates")
    procs = passes.join(updates, on="proc").filter(pl.col("passes") * 2 >= pl.col("updates"))["proc"]
    return pl.col("proc").is_in(procs.implode())


def _once(trace: Trace) -> pl.DataFrame:
    """One row a scheduler and step in which its optimizer updates: passed if it steps as often as the optimizer."""
    return _counted(trace, pl.col("_n") == pl.col("_updates"), _MODE)


def _single(trace: Trace) -> pl.DataFrame:
    """The same rows: passed if it steps no more often than the optimizer, as a schedule of epochs does."""
    return _counted(trace, pl.col("_n") <= pl.col("_updates"), _AT_MOST)


def _counted(trace: Trace, passed: pl.Expr, mode: str) -> pl.DataFrame:
    rows = _frames.memo(trace, "paced steps", _steps).with_columns(passed.alias("passed"))
    lossy = [i for i, p in enumerate(trace.processes) if p.dropped > 0]
    rows = rows.with_columns(pl.when(pl.col("passed") | ~pl.col("proc").is_in(lossy)).then("passed").alias("passed"))
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "scheduler", "passed", _frames.news(trace)) < _sightings.MANY)
    most = "at most " if mode == _AT_MOST else ""
    return _sightings.example(
        _habits.with_family(trace, rows), mode=mode, _variable=pl.col("scheduler"),
        _expected=pl.format(most + "{} step(s) of the scheduler for as many updates", "_updates"), _seen=pl.format("{} step(s) of the scheduler", "_n"),
    )  # fmt: skip


def schedules(trace: Trace) -> pl.DataFrame:
    """Steps of schedulers, that of the constructor first: the columns of calls, scheduler and kind."""
    return _frames.memo(trace, "steps of schedulers", _schedules)


def _schedules(trace: Trace) -> pl.DataFrame:
    calls = _frames.calls_of(trace, re.escape(_SCHEDULE))
    calls = calls.join(_frames.arguments(trace, calls["args"], scheduler="0.name", kind="0.type"), on="args", how="left", maintain_order="left")
    return calls.filter(_outermost(trace, calls)).drop_nulls(["scheduler", "kind"]).sort("proc", "seq")


def epochs(trace: Trace) -> pl.DataFrame:
    """One row a scheduler and update in a later pass over the data: passed if it has stepped since the pass before began."""
    passes = _fresh_batches.trained_passes(trace)
    last = (pl.col(c).shift(1).over("proc", "site").alias(f"_before{c}") for c in ("_pass", "step"))
    passes = passes.with_columns(last).select("proc", "_pass", "_before_pass", "_beforestep").sort("_pass")
    updates = _frames.updates(trace).filter(pl.col("step") >= 0).drop_nulls("optimizer").select("proc", "optimizer", "step", "seq", "site")
    updates = updates.sort("seq").join_asof(passes, left_on="seq", right_on="_pass", by="proc", strategy="backward", check_sortedness=False).drop_nulls("_before_pass")
    # Of steps in between that are not held, nobody knows what they did.
    seen = _frames.seen_steps(trace).select("proc", "step", (pl.col("step") - pl.int_range(pl.len()).over("proc")).alias("_run"))
    early = seen.select("proc", pl.col("step").alias("_beforestep"), pl.col("_run").alias("_early"))
    updates = updates.join(seen, on=["proc", "step"], how="left", maintain_order="left").join(early, on=["proc", "_beforestep"], how="left", maintain_order="left")
    updates = updates.filter(pl.col("_run") == pl.col("_early"))
    calls, mine = schedules(trace), ["proc", "scheduler", "kind"]
    made = calls.group_by(mine, maintain_order=True).agg(pl.col("seq").first().alias("_made"))
    made = made.with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    rows = made.join(updates, on=["proc", "optimizer"], how="inner", maintain_order="left").filter(pl.col("_made") < pl.col("_before_pass"))
    stepped = calls.join(made.select(*mine, pl.col("_made")), on=mine).filter(pl.col("seq") > pl.col("_made")).select(*mine, "seq", pl.col("seq").alias("_stepped"))
    rows = rows.sort("seq").join_asof(stepped.sort("seq"), on="seq", by=mine, strategy="backward", check_sortedness=False).sort("proc", "scheduler", "seq")
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    passed = (pl.col("_stepped") > pl.col("_before_pass")).fill_null(value=False)
    rows = rows.with_columns(pl.when(passed | ~lossy).then(passed).alias("passed"), pl.col("kind").alias("what"))
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "scheduler", "passed", _frames.news(trace)) < _sightings.MANY)
    return _sightings.example(
        _habits.with_family(trace, rows), mode=_EPOCH, _variable=pl.col("scheduler"), _expected=pl.lit("a step of the scheduler since the last pass over the data began"),
        _seen=pl.lit("no step of the scheduler since then"),
    )  # fmt: skip


def _steps(trace: Trace) -> pl.DataFrame:
    """One row a scheduler and step in which its optimizer updates, with how often either does: `_n`, `_updates`."""
    calls, mine = schedules(trace), ["proc", "scheduler", "kind"]
    # The first call is made by its constructor.
    made = calls.group_by(mine, maintain_order=True).agg(pl.col("step").first().alias("_made"))
    stepped = calls.group_by(*mine, "step", maintain_order=True).agg(pl.len().alias("_n"), pl.col("seq", "site").last())
    updates = _frames.updates(trace).filter(pl.col("step") >= 0).drop_nulls("optimizer")
    updates = updates.group_by("proc", "optimizer", "step", maintain_order=True).agg(
        pl.len().alias("_updates"), pl.col("seq").last().alias("_at"), pl.col("site").last().alias("_line")
    )
    made = made.with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    rows = made.join(updates, on=["proc", "optimizer"], how="inner", maintain_order="left").filter(pl.col("step") > pl.col("_made"))
    rows = rows.join(stepped, on=[*mine, "step"], how="left", maintain_order="left")
    over = _frames.whole_steps(trace).join(_next(trace), on=["proc", "step"], how="semi")
    rows = rows.join(over, on=["proc", "step"], how="semi", maintain_order="left")
    worlds = pl.DataFrame({"proc": pl.Series(range(len(trace.processes)), dtype=pl.UInt16), "_ranks": ["" if p.world == 1 else f", {p.world} ranks" for p in trace.processes]}, schema_overrides={"_ranks": pl.String})
    return rows.join(worlds, on="proc", how="left", maintain_order="left").with_columns(
        pl.concat_str("kind", "_ranks").alias("what"), pl.coalesce("seq", "_at").alias("seq"), pl.coalesce("site", "_line").alias("site"), pl.col("_n").fill_null(0),
    )  # fmt: skip


def _options(trace: Trace) -> pl.DataFrame:
    """Two rows an option and pair of the first updates: whether it moved, and whether it rested; of all groups together.

    What moves from one pass over the data to the next tells nothing, and of a job that resumes the first updates are not the first.
    """
    rows = _sightings.options(trace)
    calls = _frames.updates(trace).select("proc", "seq", "optimizer", "kind", pl.int_range(pl.len()).over("proc", "optimizer").alias("_nth"))
    rows = rows.join(calls.rename({"kind": "_kind"}), on=["proc", "seq"], how="inner", maintain_order="left").drop_nulls(["optimizer", "_kind"])
    rows = rows.filter((pl.col("_nth") < _LOOKS) & (pl.col("step") < PROLOGUE + 1)).sort("proc", "seq", "item", maintain_order=True)
    looks = rows.group_by("proc", "optimizer", "_kind", "text", "_nth", "seq", "step", maintain_order=True).agg(pl.col("number").alias("_now"))
    mine = ["proc", "optimizer", "text"]
    before, last = pl.col("_now").shift(1).over(mine), pl.col("seq").shift(1).over(mine)
    looks = looks.with_columns(before.alias("_before"), last.alias("_last"), (pl.col("_nth") == pl.col("_nth").shift(1).over(mine) + 1).alias("_next"))
    passes = _frames.calls_of(trace, re.escape(_PASS)).select("proc", pl.col("seq").alias("_pass")).sort("_pass")
    looks = looks.filter("_next").sort("seq").join_asof(passes, left_on="seq", right_on="_pass", by="proc", strategy="backward", check_sortedness=False, coalesce=False)
    looks = looks.filter((pl.col("_pass") < pl.col("_last")).fill_null(value=True)).sort("proc", "seq", maintain_order=True)
    looks = looks.with_columns((pl.col("_now") != pl.col("_before")).alias("_moved"), pl.concat_str("text", pl.lit(" of "), "_kind").alias("what"))
    looks = _habits.with_family(trace, _sightings.sites(trace, looks))
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    loads = pl.col("proc").is_in(passes["proc"].unique().implode())
    moved, seen = pl.col("_moved"), pl.format("{} after {}", *(pl.col(c).list.eval(pl.element().round_sig_figs(4).cast(pl.String)).list.join(", ") for c in ("_now", "_before")))
    found = []
    # Without a loader nobody knows where a pass ends.
    for mode, passed, rows in (("moves", moved, looks), ("rests", ~moved, looks.filter(loads))):
        rows = rows.with_columns(pl.when(passed | ~lossy).then(passed).alias("passed"))
        found.append(_sightings.example(rows, mode=mode, _variable=pl.col("text"), _expected=pl.format("{} " + mode, "text"), _seen=seen))
    return pl.concat(found)


def _course(trace: Trace) -> pl.DataFrame:
    """Changes of options behind their first fall (`falls`: passed if it falls on), and rises that are over (`peaks`: passed if the next update's is a fall)."""
    rows = _sightings.options(trace)
    mine = ["proc", "optimizer", "text"]
    updates = _frames.updates(trace).drop_nulls("optimizer").select("proc", "seq", "optimizer", "step", pl.col("kind").alias("_kind"), pl.int_range(pl.len()).over("proc", "optimizer").alias("_nth"))
    looks = rows.drop("step").join(updates, on=["proc", "seq"], how="inner", maintain_order="left").drop_nulls("_kind")
    looks = looks.group_by(*mine, "_kind", "seq", "step", "_nth", maintain_order=True).agg(pl.col("number").sum().alias("_now")).sort("proc", "seq", maintain_order=True)
    # Of the first updates all values are there, of others those that are new.
    change = (pl.col("_now") - pl.col("_now").shift(1)).over(mine)
    looks = looks.with_columns(change.alias("_change"), pl.col("_now").shift(1).over(mine).alias("_before")).filter(pl.col("_change") != 0)
    fallen = (pl.col("_change") < 0).cast(pl.Int32).cum_sum().shift(1).over(mine).fill_null(0) > 0
    following = (pl.col(c).shift(-1).over(mine).alias(f"_later{c}") for c in ("_change", "_nth"))
    looks = looks.with_columns(fallen.alias("_fallen"), *following, pl.concat_str("text", pl.lit(" of "), "_kind").alias("what"))
    # A rise is over where the next updates have been seen, step by step, and nothing changed.
    ahead = updates.select("proc", "optimizer", (pl.col("_nth") - _FLAT).alias("_nth"), (pl.col("step") - _FLAT).alias("_there"))
    looks = looks.join(ahead, on=["proc", "optimizer", "_nth"], how="left", maintain_order="left")
    rests = (pl.col("_there") <= pl.col("step")).fill_null(value=False) & (pl.col("_later_nth") > pl.col("_nth") + _FLAT).fill_null(value=True)
    turns = (pl.col("_later_nth") == pl.col("_nth") + 1) & (pl.col("_later_change") < 0)
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    looks, found = _habits.with_family(trace, _sightings.sites(trace, looks)), []
    risen = pl.format("{} after {}, and it had fallen before", *(pl.col(c).round_sig_figs(4) for c in ("_now", "_before")))
    stayed = pl.format(f"{{}} after {{}}, and no change in the {_FLAT} updates behind it", *(pl.col(c).round_sig_figs(4) for c in ("_now", "_before")))
    for mode, passed, rows, seen in (("falls", pl.col("_change") < 0, looks.filter("_fallen"), risen), ("peaks", turns.fill_null(value=False), looks.filter((pl.col("_change") > 0) & (turns | rests)), stayed)):
        rows = rows.with_columns(pl.when(passed | ~lossy).then(passed).alias("passed"))
        rows = rows.filter(pl.int_range(pl.len()).over("proc", "what", "passed", _frames.news(trace)) < _sightings.MANY)
        # A schedule has one peak, which is enough for a rule.
        rows = pl.concat([rows] * ENOUGH) if mode == "peaks" else rows
        found.append(_sightings.example(rows, mode=mode, _variable=pl.col("text"), _expected=pl.format("{} " + mode, "text"), _seen=seen))
    return pl.concat(found)


def _next(trace: Trace) -> pl.DataFrame:
    """Steps behind which the process has another: what follows the last update may not have come yet."""
    seen = _frames.seen_steps(trace)
    return seen.join(seen.select("proc", pl.col("step") - 1), on=["proc", "step"], how="semi")


def _outermost(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Calls that are in no other scheduler's step: a chain of schedulers is one."""
    code = trace.function_code.get(_SCHEDULE, -1)
    up, fn = _frames.enclosing(trace), trace.calls["fn"].to_numpy()
    inside = np.zeros(len(fn), dtype=bool)
    at = up.copy()
    for _ in range(4):
        known = at >= 0
        inside |= known & (fn[np.maximum(at, 0)] == code)
        at = np.where(known, up[np.maximum(at, 0)], -1)
    inner = trace.calls.select("proc", "seq").filter(pl.Series(inside))
    return calls.join(inner.with_columns(pl.lit(value=True).alias("_inner")), on=["proc", "seq"], how="left", maintain_order="left")["_inner"].is_null()
