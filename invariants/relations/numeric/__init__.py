"""Numbers stay sane: gradients that are applied are finite, parameters stay finite, norms do not run away.

`what="applied"`: an update does not change parameters by gradients that are not finite (a skipped update is fine).
`what="finite"`: parameters that are finite stay so. `what="alive"`: an update has a gradient that is not zero.
`what="burst"`: the norm of all gradients is not `bound` powers of ten above everything that the run has seen.
`what="drift"`: a sequential test on how often the gradients' norm is `bound` powers of ten above its median so far.
`what="growth"`: the norm of all weights does not grow `bound` powers of ten in one step.

Bounds are learned, widened, and relative to the run's own past (`_norms.py`). The probability that `drift` ever alarms
on a run that is like the learned ones is at most `ALPHA`, by Ville's inequality. Source: ours; the test is Ramdas et al.
2023, the statistics what practitioners watch (gradient norm, update size).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Severity, Standing
from proctor.invariants.relations import Confirm, Detail, Examples, Needs, Reads, Relation, _surveys, register
from proctor.invariants.relations.numeric import norms as _norms
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import Name, StateFlag, Value
from proctor.invariants.trace import Trace

ALPHA: Final = 1e-4  # probability of a false alarm of `drift` over a whole run
_RATE: Final = 0.02  # granted rate of exceedances; a learned run has none in its (at least 20) updates
_MIN_UPDATES: Final = 20
_WIDEN: Final = {"burst": 1.5, "drift": 0.75, "growth": 0.5}  # powers of ten above the largest that was learned
_LEAST: Final = {"burst": 2.5, "drift": 1.0, "growth": 1.0}
_BACKWARD: Final = "torch.autograd.backward"
_SIMPLE: Final = ("applied", "finite", "alive")
_FIELDS: Final = ("optimizer", "wrapper", "family")
_KEEP: Final = 4
_KEEP_FAILING: Final = 16


@register
class Numeric(Relation):
    """Finite, alive, and of a size that the run is used to."""

    name = "numeric"
    code = "PR112"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 4
    ahead: ClassVar[int] = 0
    alone: ClassVar[bool] = True
    confirm: ClassVar[Confirm] = "repeat"
    reach: ClassVar[int | None] = None  # norms are held against all earlier ones
    folds: ClassVar[Mapping[str, _surveys.Fold]] = {"most": "max", "updates": "max", "some": "any"}

    def survey(self, trace: Trace) -> pl.DataFrame:
        simple = [(w, bool(_SIMPLE_VIEWS[w](trace)["passed"].any()), 0.0, 0) for w in _SIMPLE]
        measured = []
        for what, view in _MEASURED.items():
            rows = view(trace)
            most = rows["rise"].max()
            updates = rows.group_by("proc", "optimizer").len()["len"].max()
            measured.append((what, rows.height > 0, float(most) if isinstance(most, int | float) else 0.0, updates or 0))
        schema = {"what": pl.String, "some": pl.Boolean, "most": pl.Float64, "updates": pl.Int64}
        return pl.DataFrame(simple + measured, schema=schema, orient="row")

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        found = []
        for what, some, most, updates in survey.select("what", "some", "most", "updates").iter_rows() if survey.width else ():
            if what in _SIMPLE and some:
                found.append(Hypothesis.of("numeric", what=what))
            elif what not in _SIMPLE and updates >= _MIN_UPDATES - _norms.WARM_UP:
                # In steps of a half, so that packs learned from like runs have like rules.
                bound = max(_LEAST[what], math.ceil(2 * (most + _WIDEN[what])) / 2)
                found.append(Hypothesis.of("numeric", what=what, bound=f"{bound:g}"))
        return found

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        parts = []
        for i, h in enumerate(hypotheses):
            what = h.text("what")
            rows = _SIMPLE_VIEWS[what](trace) if what in _SIMPLE else _judge(trace, what, float(h.text("bound")))
            parts.append(_finish(trace, rows).with_columns(pl.lit(i, dtype=pl.UInt32).alias("hyp")))
        return Examples(_stack(parts), _FIELDS, ())

    def remember(self, trace: Trace, first: int, end: int) -> pl.DataFrame | None:
        return _norms.remembered(trace, first, end)

    def severity_of(self, hypothesis: Hypothesis) -> Severity:
        """Not finite is an error; what is only unusual is a warning."""
        return Severity.ERROR if hypothesis["what"] in ("applied", "finite") else Severity.WARNING

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """What is not finite is no training; what is large may be."""
        return Standing.CONTRADICTION if hypothesis["what"] in ("applied", "finite") else Standing.CHOICE

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        """Flags say what is finite or zero."""
        return "records" if hypothesis["what"] in _SIMPLE else "numbers"

    def confirm_of(self, hypothesis: Hypothesis) -> Confirm:
        """NaN and infinity are no matter of chance."""
        return "at once" if hypothesis["what"] in ("applied", "finite") else self.confirm

    def needs(self, hypothesis: Hypothesis) -> Needs:
        states = {"finite": {"data"}, "growth": {"data"}, "applied": {"data", "grad"}}.get(hypothesis.text("what"), {"grad"})
        functions = {_frames.UPDATE, *((_BACKWARD,) if hypothesis["what"] == "alive" else ())}
        return Needs(frozenset(functions), frozenset(states), frozenset({"spent"} if hypothesis["what"] == "alive" else ()))

    def say(self, hypothesis: Hypothesis) -> str:
        bound = f"{10 ** float(hypothesis.text('bound') or 0):.3g}"
        return {
            "applied": "an update does not apply gradients that are not finite",
            "finite": "parameters that are finite stay finite",
            "alive": "an optimizer that steps again and again has a gradient that is not zero",
            "burst": f"the norm of all gradients stays below {bound} times all earlier ones of its run",
            "drift": f"the norm of all gradients is not time and again more than {bound} times its median so far",
            "growth": f"the norm of all weights does not grow to more than {bound} times in one step",
        }[hypothesis.text("what")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        what, name, step = hypothesis.text("what"), example["_name"] or "", example["step"]
        shown = f"{name}.grad" if name and what == "applied" else name
        return Detail(
            expected=self.say(hypothesis),
            seen=f"{example['_seen']} in step {step}",
            function=_frames.UPDATE if what in ("finite", "growth") else "torch.Tensor.backward",
            variable=shown,
            module=example["_module"] or "",
            advice={
                "applied": "Look at the loss of this step (log of zero, division by zero, overflow in half precision) and at what should skip such an update.",
                "finite": "See the gradients of this step and the learning rate; restore the last checkpoint before it.",
                "alive": "Look for a loss that does not depend on the model, for underflow in half precision, and for a zero_grad after backward.",
            }.get(what, "Look at the learning rate, the loss scale, clipping, and the batch of this step."),
        )


# -- finite and alive --------------------------------------------------------------------------------------------------


def _applied(trace: Trace) -> pl.DataFrame:
    """One row an update: passed unless it changed parameters by gradients that are not finite."""
    rows = _norms.gradients(trace)
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    moved = _frames.rows(trace).filter((pl.col("edge") == 1) & pl.col("fresh")).join(about.select("var"), on="var", how="semi")
    moved = moved.select("proc", pl.col("call").alias("seq"), pl.lit(value=True).alias("_moved")).unique()
    rows = rows.join(moved, on=["proc", "seq"], how="left", maintain_order="left")
    fails = pl.col("broken") & pl.col("_moved").fill_null(value=False)
    return rows.with_columns((~fails).alias("passed"), pl.lit("gradients with NaN or infinity were applied").alias("_seen"))


def _finite(trace: Trace) -> pl.DataFrame:
    """One row a process and step: passed if no parameter became not finite in it. The first that did is named."""
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    data = _frames.data_by_step(trace).join(about.select("var"), on="var", how="semi").filter(~_frames.has(int(StateFlag.NONE)))
    broken = _frames.has(int(StateFlag.NONFINITE))
    fine = data.group_by("proc", "var", maintain_order=True).agg((~broken).first().alias("_fine"))
    data = data.join(fine.filter("_fine"), on=["proc", "var"], how="semi").filter(pl.col("changed") & (pl.col("step") >= 0))
    rows = data.group_by("proc", "step", maintain_order=True).agg(
        (~broken.any()).alias("passed"), pl.col("var").filter(broken).first(), pl.col("seq").last()
    )
    return rows.with_columns(pl.lit("NaN or infinity in a parameter").alias("_seen"), pl.lit(0, dtype=pl.UInt32).alias("site"))


def _alive(trace: Trace) -> pl.DataFrame:
    """One row an update of several gradients: passed if one of them, or of the update before, is not zero. With a learning rate of 0 none is used.

    Once it may be right: a ratio that is clipped for all samples of a batch. So may be many that began at a loss of exactly 0, as of a hinge that all are
    behind, if the optimizer has had a gradient before.
    """
    rows = _norms.gradients(trace).filter(pl.col("count") > 1)
    used = _frames.used_gradients(trace).join(_frames.metas(trace, "optimizer", "lr_zero"), on="meta").filter(pl.col("lr_zero") == "true")
    resting = used.filter(_frames.has(int(StateFlag.ZERO))).select("proc", "optimizer", "step").unique()
    rows = rows.join(resting, on=["proc", "optimizer", "step"], how="anti", maintain_order="left")
    rows = rows.sort("proc", "optimizer", "step")
    spent = _sightings.sightings(trace, Value.SPENT).select("proc", "step", pl.lit(value=True).alias("_spent")).unique()
    rows = rows.join(spent, on=["proc", "step"], how="left", maintain_order="left")
    learned = (~pl.col("zero")).cum_max().over("proc", "optimizer")
    rows = rows.with_columns(pl.col("zero") & ~(pl.col("_spent").fill_null(value=False) & learned)).drop("_spent")
    both = pl.col("zero") & pl.col("zero").shift(1).over("proc", "optimizer").fill_null(value=False)
    passed = pl.when(~both | ~pl.col("lossy")).then(~both)
    return rows.with_columns(passed.alias("passed"), pl.format("all {} gradients are zero, as in the update before", "count").alias("_seen"))


_SIMPLE_VIEWS: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    "applied": lambda t: _frames.memo(t, "numeric applied", _applied),
    "finite": lambda t: _frames.memo(t, "numeric finite", _finite),
    "alive": lambda t: _frames.memo(t, "numeric alive", _alive),
}


# -- norms -------------------------------------------------------------------------------------------------------------


def _step_growth(trace: Trace) -> pl.DataFrame:
    rows = _norms.weights(trace).sort("proc", "optimizer", "step")
    past = pl.col("norm").shift(1).over("proc", "optimizer")
    rows = rows.with_columns((pl.col("norm") / past).log10().alias("rise"), past.alias("past"))
    # A layer that is given to the optimizer later, as one that thaws, brings its weights with it.
    return rows.filter(pl.col("rise").is_finite() & ~pl.col("more"))


_MEASURED: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    "burst": lambda t: _frames.memo(t, "numeric burst", lambda t: _norms.rises(_norms.gradients(t))),
    "drift": lambda t: _frames.memo(t, "numeric drift", lambda t: _norms.against_median(_norms.gradients(t))),
    "growth": lambda t: _frames.memo(t, "numeric growth", _step_growth),
}


def _judge(trace: Trace, what: str, bound: float) -> pl.DataFrame:
    rows = _MEASURED[what](trace)
    high = pl.col("rise") > bound
    if what == "drift":
        mine = ["proc", "optimizer"]
        rows = rows.with_columns(high.alias("exceeds"))
        wealth = _norms.log_wealth(mine, _RATE)
        rows = rows.with_columns(wealth.alias("_wealth"), (pl.int_range(pl.len()).over(mine) + 1).alias("update"))
        high = pl.col("_wealth") > _norms.level(ALPHA)
    size, rise = _short(pl.col("norm")), _short(10 ** pl.col("rise"))
    seen = {
        "burst": pl.format("gradients of norm {}, {} times the largest before", size, rise),
        "drift": pl.when(pl.col("rise") > bound)
        .then(pl.format("gradients of norm {}, {} times the median before, and so again and again", size, rise))
        .otherwise(pl.format("gradients of norm {}, after many that were more than {} times the median before", size, pl.lit(f"{10**bound:.3g}"))),
        "growth": pl.format("weights of norm {}, {} times as before", size, rise),
    }[what]
    return rows.with_columns(pl.when(~high | ~pl.col("lossy")).then(~high).alias("passed"), seen.alias("_seen"))


def _short(number: pl.Expr) -> pl.Expr:
    """Three digits of it; as a double some show fifteen nines."""
    return number.round_sig_figs(3).cast(pl.Float32)


# -- frames ------------------------------------------------------------------------------------------------------------


def _finish(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Thinned, with fields and the names of what is to blame."""
    ok = pl.col("passed").fill_null(value=True)
    rows = rows.sort("step", "proc", maintain_order=True)
    new = _frames.news(trace)
    rows = rows.filter(
        pl.when(ok).then(pl.int_range(pl.len()).over("proc", ok, new) < _KEEP).otherwise((~ok).cum_sum().over("proc", new) <= _KEEP_FAILING)
    )
    if "var" not in rows.columns:
        rows = rows.with_columns(pl.lit(None, dtype=pl.UInt32).alias("var"))
    if "optimizer" not in rows.columns:
        rows = rows.with_columns(pl.lit(None, dtype=pl.String).alias("optimizer"))
    kinds = _frames.memo(trace, "classes of optimizers", lambda t: _frames.updates(t).select("proc", "optimizer", "kind").drop_nulls().unique(["proc", "optimizer"]))
    names = _frames.lasting(trace, Name.VARIABLE, "names and modules", lambda t: t.variables.select("var", pl.col("name").alias("_name"), pl.col("module").alias("_module")))
    rows = rows.join(kinds, on=["proc", "optimizer"], how="left", maintain_order="left").drop("optimizer").rename({"kind": "optimizer"})
    rows = rows.join(names, on="var", how="left", maintain_order="left").join(_frames.memo(trace, "wrappers of processes", _wrappers), on="proc", how="left", maintain_order="left")
    return rows.join(trace.families, on="proc", how="left", maintain_order="left")


def _wrappers(trace: Trace) -> pl.DataFrame:
    """What wraps the models of each process: proc, wrapper."""
    used = trace.states.select("proc", "meta").unique().join(_frames.metas(trace, "wrapper"), on="meta").drop_nulls("wrapper")
    return used.group_by("proc").agg(pl.col("wrapper").unique().sort().str.join(","))


def _stack(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    types: dict[str, Any] = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}
    columns = {**types, **dict.fromkeys((*_FIELDS, "_name", "_module", "_seen"), pl.String)}
    even = [part.select(pl.col(c).cast(t) for c, t in columns.items()) for part in parts]
    return pl.concat(even) if even else pl.DataFrame(schema=columns)
