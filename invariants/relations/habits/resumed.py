"""A program goes on where it was: numbers that were saved are restored, counters do not go back, batches do not come again.

`numbers`: after a load an optimizer goes on with the options and the count of updates that it was given, and a scheduler whose state
is in the file is given it before training goes on. `onward`: a counter of the program does not go back behind a load. `again`: what is trained on
after a load was not trained on before it. `parts`: what a program saves to go on from has the parts that it had. `pass`: a pass over a loader gives as many batches as the one before it at the same line.

Each is a habit of a program, held where all its runs keep it; to fine-tune with another rate, to train one fold after the other and
to end an epoch early are ways to train. A run that goes on in another process is held against what that process loads, not against
the records of the first. Catches a schedule or a count that begins anew, an epoch that is done twice, an epoch that ends early.
Source: ours; `roundtrip` (PR108) says the same of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Relation, _surveys, register
from proctor.invariants.relations.fresh import batches as _fresh_batches
from proctor.invariants.relations.habits import _saved_parts
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.checkpoints import SAVE
from proctor.invariants.schema import MODEL_CALL, CallFlag, Value
from proctor.invariants.trace import Trace

_GIVEN: Final = "torch.optim.Optimizer.load_state_dict"
_SCHEDULE_GIVEN: Final = "torch.optim.lr_scheduler.LRScheduler.load_state_dict"
_POSITION: Final = "['last_epoch']"
_LOADS: Final = ("torch.load", _GIVEN, _SCHEDULE_GIVEN)  # a target network is given a state, too
_SOON: Final = 3  # steps after a load whose batches are looked at
_COUNTS: Final = 3  # steps of one size by which a number is known to count
_REMEMBERED: Final = 100_000  # batches
_ROUNDING: Final = 1e-9  # relative
_WHATS: Final = {"numbers": "optimizers and schedulers", "again": "batches", "pass": "passes"}
_SAYS: Final = {
    "numbers": "after a load, optimizers and schedulers go on with the numbers that were loaded",
    "again": "no batch that is trained on after a load was trained on before it",
    "pass": "a pass over a loader gives as many batches as the pass before it",
}
_ADVICE: Final = {
    "numbers": "Look at what is loaded and what is set afterwards: the scheduler's load_state_dict, a learning rate that is set anew, an "
    "optimizer that is built after the load.",
    "onward": "Look at where this counter begins after a resume, and at what sets it anew.",
    "again": "Look at the epoch and the position in it from which training goes on, and at the seed of the order of samples.",
    "parts": "Look at what is put into the file: a resume goes on without what is missing.",
    "pass": "Look for a break, for a sampler that is used up or keeps its position, and for batches that are skipped once and for all.",
}


@register
class Resumed(Relation):
    """Training goes on where it was."""

    name = "resumed"
    code = "PR121"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 1
    reach: ClassVar[int | None] = _SOON

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        # A number that moves otherwise than by steps of one size is no counter; what it does says nothing for a rule.
        counters = _counters(trace)
        onward = _onward(trace).filter(~pl.col("passed") | pl.col("_counts"))
        strange = onward.join(counters.filter("_counts"), on=["proc", "what"], how="anti").with_columns(pl.lit(value=False).alias("passed"))
        found = pl.concat([_of_loads(trace), onward.drop("_counts"), strange.drop("_counts")])
        return self.merge([_habits.survey(self.name, found, 1), _surveys.of_hypotheses(_saved_parts.propose(trace, self.name))])

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(
            trace, pl.concat([_of_loads(trace), _behind_loads(trace, _onward(trace).drop("_counts")), _saved_parts.examples(trace, hypotheses)]), hypotheses
        )

    def remember(self, trace: Trace, first: int, end: int) -> pl.DataFrame | None:
        return _batches(trace).filter(pl.col("step") < end).head(_REMEMBERED)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        match hypothesis["mode"]:
            case "numbers":
                functions = {_frames.UPDATE, _GIVEN, _SCHEDULE_GIVEN, "torch.load"}
                return Needs(frozenset(functions), values=frozenset({"option"}))
            case "again":
                return Needs(frozenset({_GIVEN, MODEL_CALL, _frames.UPDATE}), values=frozenset({"batch"}))
            case _saved_parts.MODE:
                return Needs(frozenset({SAVE, _frames.UPDATE}))
            case "pass":
                return Needs(frozenset({_fresh_batches.ITER, _fresh_batches.NEXT, _frames.UPDATE}))
        return Needs(frozenset({_frames.UPDATE}), values=frozenset({"number"}))

    def say(self, hypothesis: Hypothesis) -> str:
        function, _, name = hypothesis.text("what").rpartition(":")
        if hypothesis["mode"] == _saved_parts.MODE:
            return f"what {function or 'the script'} saves has {name.replace(',', ', ')}" + _habits.of_programs(hypothesis)
        return _SAYS.get(hypothesis.text("mode"), f"{name} in {function} never goes back") + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode = hypothesis.text("mode")
        return _sightings.detail(example, _ADVICE[mode], expected=_SAYS.get(mode, ""))


def _of_loads(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "resumed", {"numbers": _numbers, "again": _again, "pass": _passes})


def _lossy(trace: Trace) -> pl.Expr:
    return pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])


# -- optimizers and schedulers ---------------------------------------------------------------------------------------------------


def _numbers(trace: Trace) -> pl.DataFrame:
    return pl.concat([_of_optimizers(trace), _of_schedulers(trace)])


def _options(trace: Trace) -> pl.DataFrame:
    """Rows of options with `when`, and the name of the object whose call they are of: `held`."""
    rows = _sightings.sightings(trace, Value.OPTION).join(_frames.metas(trace, "when"), on="meta", how="left", maintain_order="left")
    calls = trace.calls.select("proc", "seq", "args")
    rows = rows.join(calls, on=["proc", "seq"], how="inner", maintain_order="left")
    return rows.join(_frames.arguments(trace, rows["args"], held="0.name"), on="args", how="left", maintain_order="left").sort("proc", "seq", maintain_order=True)


def _of_optimizers(trace: Trace) -> pl.DataFrame:
    """One row a number of a group at the first update after a load: passed if it is the number that was given."""
    rows = _options(trace).drop_nulls("held")
    key = ["proc", "held", "text", "item"]
    given = rows.filter(pl.col("when") == "given").select(*key, "seq", pl.col("number").alias("_given"), pl.col("seq").alias("_load"))
    used = rows.filter(pl.col("when") == "update").select(*key, "seq", "step", "number").sort("seq")
    found = used.join_asof(given.sort("seq"), on="seq", by=key, strategy="backward", check_sortedness=False).drop_nulls("_load")
    found = found.sort("proc", "seq", maintain_order=True).unique([*key, "_load"], keep="first", maintain_order=True)
    same = (pl.col("number") - pl.col("_given")).abs() <= pl.col("_given").abs() * _ROUNDING
    found = found.with_columns(pl.when(same | ~_lossy(trace)).then(same).alias("passed"))
    return _finish(
        trace, found, "numbers", _function=pl.lit(_frames.UPDATE), _variable=pl.format("{} of group {} of optimizer {}", "text", "item", "held"),
        _expected=pl.format("{} is {}, as it was loaded", "text", pl.col("_given").round_sig_figs(6)),
        _seen=pl.format("the next update begins with {}", pl.col("number").round_sig_figs(6)),
    )  # fmt: skip


def _of_schedulers(trace: Trace) -> pl.DataFrame:
    """One row a scheduler's state in a loaded file: passed if it is given to a scheduler before the second update that follows."""
    rows = _options(trace)
    files = rows.filter((pl.col("when") == "file") & pl.col("text").str.ends_with(_POSITION)).select("proc", "seq", "step", "text", "number")
    given = rows.filter((pl.col("when") == "given") & (pl.col("text") == "last_epoch")).select("proc", "number", pl.col("seq").alias("_given"))
    second = _frames.updates(trace).select("proc", pl.col("seq").alias("_update"))
    until = files.join(second, on="proc").filter(pl.col("_update") > pl.col("seq")).sort("_update")
    until = until.group_by("proc", "seq", "text", maintain_order=True).agg(pl.col("_update").slice(1, 1).first()).drop_nulls("_update")
    files = files.join(until, on=["proc", "seq", "text"], how="inner", maintain_order="left")
    met = files.join(given, on=["proc", "number"]).filter((pl.col("_given") > pl.col("seq")) & (pl.col("_given") < pl.col("_update")))
    met = met.select("proc", "seq", "text", pl.lit(value=True).alias("_met")).unique()
    files = files.join(met, on=["proc", "seq", "text"], how="left", maintain_order="left").with_columns(pl.col("_met").fill_null(value=False))
    files = files.with_columns(pl.when(pl.col("_met") | ~_lossy(trace)).then("_met").alias("passed"))
    return _finish(
        trace, files, "numbers", _function=pl.lit(_SCHEDULE_GIVEN), _variable=pl.col("text"),
        _expected=pl.lit("the state of the scheduler in the file reaches its load_state_dict before training goes on"),
        _seen=pl.format("the scheduler is not at {}, where the file has it: updates go on without", "number"),
    )  # fmt: skip


# -- batches ---------------------------------------------------------------------------------------------------------------------


def _batches(trace: Trace) -> pl.DataFrame:
    """Training batches, remembered ones first: proc, step, seq, fp."""
    rows = _fresh_batches.batches(trace).filter(~pl.col("flat")).select("proc", "step", "seq", "fp")
    past = trace.past.get("resumed")
    both = pl.concat([past.select(rows.columns).cast(dict(rows.schema)), rows]) if past is not None else rows  # type: ignore[arg-type]
    return both.unique(["proc", "seq"], keep="first", maintain_order=True).sort("proc", "seq")


def _again(trace: Trace) -> pl.DataFrame:
    """One row a batch soon after a load: passed if it did not come before the load."""
    loads = _frames.calls_of(trace, re.escape(_GIVEN)).select("proc", pl.col("seq").alias("_load"), pl.col("step").alias("_at"))
    rows = _batches(trace).join(loads, on="proc").filter((pl.col("seq") > pl.col("_load")) & (pl.col("step") <= pl.col("_at") + _SOON))
    rows = rows.sort("proc", "seq", "_load").unique(["proc", "seq"], keep="last", maintain_order=True)
    first = _batches(trace).group_by("proc", "fp").agg(pl.col("seq").min().alias("_first"), pl.col("step").min().alias("_before"))
    trained = _batches(trace).group_by("proc").agg(pl.col("seq").min().alias("_begun"))
    rows = rows.join(first, on=["proc", "fp"], how="left", maintain_order="left").join(trained, on="proc", how="left", maintain_order="left")
    rows = rows.filter(pl.col("_begun") < pl.col("_load")).with_columns((pl.col("_first") > pl.col("_load")).alias("passed"))
    return _finish(
        trace, rows, "again", _function=pl.lit(_GIVEN), _expected=pl.lit("batches that were not trained on before the load"),
        _seen=pl.format("the batch of step {} again, tensor by tensor", "_before"),
    )  # fmt: skip


def _passes(trace: Trace) -> pl.DataFrame:
    """One row a pass but the first at one line: passed if it gave as many batches as the one before it."""
    codes = {name: trace.function_code.get(name, -1) for name in (_fresh_batches.ITER, _fresh_batches.NEXT)}
    calls = trace.calls.filter(pl.col("fn").is_in(list(codes.values()))).join(trace.contexts.select("ctx", "step"), on="ctx", how="left")
    calls = calls.sort("proc", "seq").with_columns((pl.col("fn") == codes[_fresh_batches.ITER]).alias("_iter"))
    calls = calls.with_columns(pl.col("_iter").cum_sum().over("proc", "site").alias("_nth"), _frames.has(int(CallFlag.RAISED)).alias("_raised"))
    at = ["proc", "site"]
    found = calls.filter(pl.col("_nth") > 0).group_by(*at, "_nth", maintain_order=True).agg(
        (~pl.col("_iter") & ~pl.col("_raised")).sum().alias("_n"), (~pl.col("_iter") & pl.col("_raised")).any().alias("_end"),
        pl.col("step").first().alias("_from"), pl.col("step").last(), pl.col("seq").last(),
    )  # fmt: skip
    last = pl.col("_nth") == pl.col("_nth").max().over(at)
    found = found.filter((pl.col("_n") > 0) & (~last | pl.col("_end")))
    found = found.with_columns(pl.col("_n").shift(1).over(at).alias("_before"), pl.col("_nth").shift(1).over(at).alias("_prior"), pl.col("_from").shift(1).over(at).alias("_start"))
    found = found.filter(pl.col("_prior") == pl.col("_nth") - 1)
    # Where steps are missing, so may be batches.
    seen = _frames.seen_steps(trace).with_columns((pl.col("step") - pl.int_range(pl.len()).over("proc")).alias("_gaps"))
    for column in ("step", "_start"):
        found = found.join(seen.rename({"step": column, "_gaps": f"{column}_gaps"}), on=["proc", column], how="inner", maintain_order="left")
    found = found.filter(pl.col("step_gaps") == pl.col("_start_gaps"))
    same = pl.col("_n") == pl.col("_before")
    found = found.with_columns(pl.when(~_lossy(trace)).then(same).alias("passed"))
    return _finish(
        trace, found.drop("site"), "pass", _function=pl.lit(_fresh_batches.NEXT), _expected=pl.format("{} batches, as in the pass before", "_before"),
        _seen=pl.format("{} batches", "_n"),
    )  # fmt: skip


# -- counters --------------------------------------------------------------------------------------------------------------------


def _looks(trace: Trace) -> pl.DataFrame:
    """Whole numbers at updates, the first look at each in a step, with the change since the look before: proc, text, step, seq, number, change, next."""
    rows = _sightings.sightings(trace, Value.NUMBER).filter((pl.col("step") >= 0) & ~pl.col("text").str.ends_with(":return") & ~pl.col("text").str.ends_with(")"))
    calls = _frames.calls_of(trace, re.escape(_frames.UPDATE)).select("proc", "seq")
    rows = rows.join(calls, on=["proc", "seq"], how="semi", maintain_order="left").sort("proc", "text", "seq", maintain_order=True)
    rows = rows.unique(["proc", "text", "step"], keep="first", maintain_order=True)
    mine = ["proc", "text"]
    whole = (pl.col("number") == pl.col("number").round()).all().over(mine)
    return rows.filter(whole).select(*mine, "step", "seq", "number", pl.col("number").diff().over(mine).alias("change"), (pl.col("step").diff().over(mine) == 1).alias("next"))


def _counters(trace: Trace) -> pl.DataFrame:
    """Which whole numbers count in this process: proc, what, _counts."""
    moved = _frames.memo(trace, "resumed looks", _looks).filter(pl.col("change").fill_null(0) != 0)
    near = pl.col("change").filter("next")
    return moved.group_by("proc", pl.col("text").alias("what")).agg(((near.n_unique() == 1) & (near > 0).all() & (near.len() >= _COUNTS)).alias("_counts"))


def _onward(trace: Trace) -> pl.DataFrame:
    """One row a change of a whole number: passed if it did not go back. With `_counts`."""
    return _frames.memo(trace, "resumed onward", _find_onward)


def _find_onward(trace: Trace) -> pl.DataFrame:
    rows = _frames.memo(trace, "resumed looks", _looks).filter(pl.col("change").fill_null(0) != 0)
    rows = rows.with_columns((pl.col("change") > 0).alias("passed"), (pl.col("number") - pl.col("change")).alias("_before"))
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "text", "passed", _frames.news(trace)) < _sightings.MANY)
    rows = rows.join(_counters(trace), left_on=["proc", "text"], right_on=["proc", "what"], how="left", maintain_order="left")
    name = pl.col("text").str.split(":").list.last()
    found = _sightings.example(
        _habits.with_family(trace, _sightings.sites(trace, rows)), mode="onward", what=pl.col("text"), _variable=name,
        _function=pl.col("text").str.extract(r"^(.*):"), _expected=pl.format("{} at least {}", name, "_before"), _seen=pl.format("{} after {}", "number", "_before"),
    )  # fmt: skip
    return found.with_columns(rows["_counts"].fill_null(value=False))


def _behind_loads(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """A number that goes back where nothing was loaded may count episodes: undecided."""
    loads = _frames.calls_of(trace, *map(re.escape, _LOADS)).group_by("proc").agg(pl.col("seq").min().alias("_load"))
    rows = rows.join(loads, on="proc", how="left", maintain_order="left")
    decided = pl.col("passed") | (pl.col("_load") <= pl.col("seq")).fill_null(value=False)
    return rows.with_columns(pl.when(decided).then("passed").alias("passed")).drop("_load")


def _finish(trace: Trace, rows: pl.DataFrame, mode: str, **columns: Any) -> pl.DataFrame:
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "passed", _frames.news(trace)) < _sightings.MANY * 4)
    return _sightings.example(_habits.with_family(trace, _sightings.sites(trace, rows)), mode=mode, what=_WHATS[mode], **columns)
