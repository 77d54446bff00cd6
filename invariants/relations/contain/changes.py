"""State changes that training acts bring about: the part of `contain` that speaks of parameters and gradients.

An example is a parameter at one act. What may keep a healthy parameter unchanged is no example: a gradient that is
missing, zero, not finite or too small to move a float, a learning rate of zero, an optimizer that did not step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Needs
from proctor.invariants.relations.contain.change_words import CLAIMS, STEP, WORDS, ZERO_GRAD
from proctor.invariants.relations.contain.held import held_by_optimizer, twins, whole_modules
from proctor.invariants.relations.contain.trained import (
    changed_data,
    decided,
    finish,
    held_parameters,
    parameters,
    trainable,
)
from proctor.invariants.relations.views import checkpoints as _checkpoints
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.absence import one_model
from proctor.invariants.schema import MODEL_CALL, StateFlag
from proctor.invariants.trace import Trace

_BOUND: Final = ("each", "saved")
FIELDS: Final = ("module", "kind", "position", "dtype", "wrapper", "in_optimizer", "optimizer")
SCOPE: Final = ("dtype",)
_FEW: Final = 2  # numbers in a tensor
_NORMALISATION: Final = "(?i)norm"


def survey(trace: Trace) -> pl.DataFrame:
    """What each view is about, with `some` and `every`: whether any, and whether all decided examples passed."""
    passed = pl.col("passed")
    found = []
    for (parent, attr, who), view in _VIEWS.items():
        rows = view(trace)
        slots = ["bound", "slot"] if who in _BOUND else [pl.lit("").alias("bound"), pl.lit("").alias("slot")]
        subject = [pl.lit(v).alias(k) for k, v in (("parent", parent), ("attr", attr), ("who", who))]
        rows = rows.select(*subject, *slots, "passed")
        by = rows.group_by("parent", "attr", "who", "bound", "slot")
        found.append(by.agg(passed.any().alias("some"), passed.all().alias("every")))
    return pl.concat(found)


def settle(survey: pl.DataFrame) -> list[Hypothesis]:
    found = []
    for row in survey.select("parent", "attr", "who", "bound", "slot", "some", "every").iter_rows(named=True):
        some, every = row.pop("some"), row.pop("every")
        about = {"kind": "change", "role": "parameter", **row}
        if row["who"] in _BOUND:  # of what this holds is known of one kind of program, or one caller, only
            if every and (row["bound"] or row["who"] == "saved"):
                found.append(Hypothesis.of("contain", **about))
        elif some:
            found.append(Hypothesis.of("contain", **{k: v for k, v in about.items() if k not in ("bound", "slot")}))
    return found


def examples(trace: Trace, hypotheses: Sequence[tuple[int, Hypothesis]]) -> pl.DataFrame:
    parts = []
    for (parent, attr, who), view in _VIEWS.items():
        mine = [(i, h) for i, h in hypotheses if (h.text("parent"), h.text("attr"), h.text("who")) == (parent, attr, who)]
        if who in _BOUND and mine:
            wanted = [(i, h.text("bound"), h.text("slot")) for i, h in mine]
            index = pl.DataFrame(wanted, schema={"hyp": pl.UInt32, "bound": pl.String, "slot": pl.String}, orient="row")
            parts.append(view(trace).join(index, on=["bound", "slot"]).drop("bound", "slot"))
        else:
            parts += [view(trace).with_columns(pl.lit(i, dtype=pl.UInt32).alias("hyp")) for i, _ in mine]
    return pl.concat(parts, how="diagonal") if parts else pl.DataFrame(schema={"hyp": pl.UInt32})


def standing(hypothesis: Hypothesis) -> Standing:
    """What an act does to what it is given is no choice; which layers learn is one."""
    key = (hypothesis.text("parent"), hypothesis.text("attr"), hypothesis.text("who"))
    if key in ((_frames.UPDATE, "data", "trainable"), (ZERO_GRAD, "grad", "trainable")):
        return Standing.CONTRADICTION
    if key in ((STEP, "data", "trainable"), (_frames.UPDATE, "grad", "some"), (STEP, "data", "module")):
        return Standing.LAW
    return Standing.HABIT if key[2] in _BOUND else Standing.CHOICE


def needs(hypothesis: Hypothesis) -> Needs:
    if hypothesis["who"] == "saved":
        return Needs(frozenset({_checkpoints.SAVE, hypothesis.text("slot")} - {""}), frozenset({"data"}))
    if hypothesis["who"] == "twin":
        return Needs(frozenset({_frames.UPDATE, MODEL_CALL}), frozenset({"data", "grad"}))
    acts = {_frames.UPDATE} if hypothesis["parent"] == STEP else {_frames.UPDATE, hypothesis.text("parent")}
    return Needs(frozenset(acts), frozenset({"data", "grad"}))


def say(hypothesis: Hypothesis) -> str:
    if hypothesis["who"] == "saved":
        return f"what {hypothesis['slot'] or 'the script'} saves of a model holds all its parameters"
    if hypothesis["who"] == "each":
        return f"parameters {hypothesis['slot']} have a gradient whenever their optimizer steps"
    return CLAIMS[hypothesis.text("parent"), hypothesis.text("attr"), hypothesis.text("who")]


def detail(hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
    parent, attr, who = (hypothesis.text(k) for k in ("parent", "attr", "who"))
    name, step = example["_name"], example["step"]
    shown = f"{name}.grad" if attr == "grad" else name
    function, expected, seen, advice = WORDS[parent, attr, who]
    return Detail(
        expected=expected.format(name=name),
        seen=seen.format(name=name, step=step, cause=example.get("_cause") or ""),
        function=hypothesis.text("slot") + " (torch.save)" if who == "saved" and hypothesis.text("slot") else function,
        variable=shown,
        module=example["_module"],
        advice=advice.format(name=name, slot=hypothesis.text("slot") or "the script"),
    )


# -- examples -----------------------------------------------------------------------------------------------------------


def _updated_by_call(trace: Trace) -> pl.DataFrame:
    rows = trainable(trace).filter(pl.col("optimizer").is_not_null() & pl.col("update").is_not_null())
    data = parameters(trace)["var"].implode()
    moved = _frames.rows(trace).filter(pl.col("fresh") & pl.col("var").is_in(data))
    during = moved.filter(pl.col("edge") == 1).select("proc", "var", pl.col("call").alias("update"), pl.lit(value=True).alias("changed"))
    # An update with a closure may have moved a parameter before a backward of it, and leave it there.
    inner = moved.join(_frames.inner_backwards(trace), on=["proc", "call"]).select("proc", "var", "update", pl.lit(value=True).alias("changed"))
    during = pl.concat([during, inner]).unique()
    rows = rows.join(during, on=["proc", "var", "update"], how="left", maintain_order="left")
    return finish(trace, _moved(rows, pl.col("changed").fill_null(value=False)).with_columns(pl.col("update").alias("seq")))


def _updated_in_step(trace: Trace) -> pl.DataFrame:
    whole = _frames.whole_steps(trace).with_columns(pl.lit(value=True).alias("_whole"))
    rows = trainable(trace).filter(pl.col("model") != "").join(whole, on=["proc", "step"], how="left", maintain_order="left")
    changes = changed_data(trace)
    rows = rows.join(changes, on=["proc", "var", "step"], how="left", maintain_order="left")
    # A copy from masters may be seen only after the next step began.
    late = changes.select("proc", "var", pl.col("step") - 1, pl.col("changed").alias("_late"))
    rows = rows.join(late, on=["proc", "var", "step"], how="left", maintain_order="left")
    after = whole.select("proc", pl.col("step") - 1, pl.col("_whole").alias("_next"))
    rows = rows.join(after, on=["proc", "step"], how="left", maintain_order="left")
    copied = pl.col("optimizer").is_null()
    passed = pl.col("changed").fill_null(value=False) | (copied & pl.col("_late").fill_null(value=False))
    known = pl.when(copied).then("_next").otherwise("_whole").fill_null(value=False)
    never = pl.when(pl.col("update").is_null()).then(pl.lit("; no optimizer step in this process at all"))
    return finish(trace, _moved(rows.filter(passed | known), passed).with_columns(never.otherwise(pl.lit("")).alias("_cause")))





def _optimizer_has_work(trace: Trace) -> pl.DataFrame:
    """An optimizer that steps where gradients are computed holds some that has one; a row names the first parameter.

    One built before the model was wrapped, moved or copied holds tensors that nothing uses.
    """
    steps = _frames.updates(trace).select("proc", "step", "seq", "site", "optimizer").filter(pl.col("step") >= 0)
    steps = steps.unique(["proc", "step", "optimizer"], keep="last", maintain_order=True)
    grads = _frames.rows(trace).join(trace.variables.filter(pl.col("attr") == "grad").select("var"), on="var", how="semi")
    grads = grads.join(_frames.metas(trace, "optimizer", "requires_grad", "dtype", "wrapper"), on="meta", how="left", maintain_order="left")
    full = grads.filter(~_frames.has(int(StateFlag.NONE)))
    # Whatever had a gradient at some time, has work: it may rest in a step, or be frozen.
    working = full.select("proc", "optimizer", pl.lit(value=True).alias("_works")).drop_nulls().unique()
    loose = full.filter(pl.col("optimizer").is_null() & (pl.col("requires_grad") == "true")).rename({"var": "grad"})
    names = held_parameters(trace).select("proc", "var", "grad", "name", "module", "kind", "position", "model")
    loose = loose.join(names.filter(pl.col("model") != ""), on=["proc", "grad"])
    loose = loose.join(changed_data(trace), on=["proc", "var", "step"], how="anti")
    loose = loose.sort("grad").group_by("proc", "step").agg(pl.col("var", "name", "module", "kind", "position", "dtype", "wrapper").first())
    held = held_parameters(trace).filter(pl.col("optimizer").is_not_null()).sort("var")
    held = held.group_by("proc", "optimizer").agg(pl.col("var", "name", "module", "kind", "position", "dtype", "wrapper").first())
    steps = steps.join(working, on=["proc", "optimizer"], how="left").with_columns(pl.col("_works").fill_null(value=False).alias("passed"))
    good = steps.filter("passed").join(held, on=["proc", "optimizer"])
    whole = _frames.whole_steps(trace)
    bad = steps.filter(~pl.col("passed")).join(loose, on=["proc", "step"]).join(whole, on=["proc", "step"], how="semi")
    return finish(trace, pl.concat([good, bad.select(good.columns)]))


def _output_learns(trace: Trace) -> pl.DataFrame:
    """The last layer of the model in training, also where somebody froze it."""
    held = held_parameters(trace).filter((pl.col("model") != "") & (pl.col("optimizer").is_not_null()).any().over("proc", "model"))
    sized = held.with_columns(pl.col("numel").sum().over("proc", "model").alias("_size"))
    held = sized.filter(pl.col("_size") == pl.col("_size").max().over("proc"))
    output = pl.col("position") == "last"
    # Frozen with adapters, or with a backbone that learns, is a way to train; frozen with only norms in training is not.
    elsewhere = ~pl.col("frozen") & ~output & ~pl.col("module").str.contains(_NORMALISATION) & (pl.col("kind") != "bias")
    held = held.with_columns(
        pl.col("frozen").any().over("proc", "model").alias("_any_frozen"), elsewhere.any().over("proc", "model").alias("_elsewhere")
    )
    # A number beside what trains in this layer (a margin, a range) is not what the layer gives: a weight that is frozen beside its bias is larger.
    training = pl.col("numel").filter(output & ~pl.col("frozen")).max().over("proc", "model").fill_null(0)
    last = held.filter(output & ~(pl.col("_any_frozen") & pl.col("_elsewhere")) & ~(pl.col("frozen") & (pl.col("numel") <= training)))
    steps = _frames.updates(trace).select("proc", "step", "seq", "site", "optimizer")
    owners = held.select("proc", "model", "optimizer").drop_nulls().unique()
    steps = steps.join(owners, on=["proc", "optimizer"]).group_by("proc", "model", "step").agg(pl.col("seq", "site").last())
    changes = changed_data(trace)
    moving = changes.join(held.select("proc", "var", "model"), on=["proc", "var"]).select("proc", "model", "step").unique()
    steps = steps.join(moving, on=["proc", "model", "step"], how="semi").join(_frames.whole_steps(trace), on=["proc", "step"], how="semi")
    rows = last.join(steps, on=["proc", "model"]).join(changes, on=["proc", "var", "step"], how="left")
    pushed = decided(trainable(trace), pl.lit(value=False)).select("proc", "var", "step", pl.lit(value=True).alias("_pushed"))
    rows = rows.join(pushed, on=["proc", "var", "step"], how="left")
    passed = pl.col("changed").fill_null(value=False)
    rows = rows.filter(passed | pl.col("frozen") | pl.col("_pushed").fill_null(value=False))
    cause = pl.when("frozen").then(pl.lit("; requires_grad is False, while other parameters change")).otherwise(pl.lit(""))
    return finish(trace, rows.with_columns(passed.alias("passed"), cause.alias("_cause")))


def _cleared(trace: Trace) -> pl.DataFrame:
    """`Optimizer.zero_grad` clears the gradients of the parameters of its optimizer, itself or by others that it calls."""
    calls = _last_within(_frames.calls_of(trace, re.escape(ZERO_GRAD)).filter(pl.col("step") >= 0))
    calls = calls.join(_frames.arguments(trace, calls["args"], optimizer="0.name"), on="args", how="left").select("proc", "seq", "step", "site", "optimizer", "_last")
    held = held_parameters(trace).select("proc", pl.col("grad").alias("var"), "optimizer", "name", "module", "kind", "position", "dtype", "wrapper", "covered", "model")
    mine = calls.join(held.filter(pl.col("optimizer").is_not_null()), on=["proc", "optimizer"])
    loose = held.filter(pl.col("optimizer").is_null() & ~pl.col("covered") & (pl.col("model") != "")).drop("optimizer")
    mine = pl.concat([mine, calls.drop("optimizer").join(loose, on="proc")], how="diagonal").drop_nulls("var")
    grads = _frames.rows(trace).join(trace.variables.filter(pl.col("attr") == "grad").select("var"), on="var", how="semi")
    empty = _frames.has(int(StateFlag.NONE | StateFlag.ZERO))
    # Order of observations: what is seen at the end of a call comes after its beginning.
    place = pl.col("seq").cast(pl.Int64) * 2 + pl.when(pl.col("edge") == 1).then(1).otherwise(0)
    after = grads.filter(pl.col("edge") == 1).group_by("proc", "var", pl.col("call").alias("_last")).agg(empty.last().alias("_empty"))
    after = after.with_columns(pl.col("_last").alias("_in")).sort("_last")
    grads = grads.join(_frames.metas(trace, "optimizer").rename({"optimizer": "_holder"}), on="meta", how="left", maintain_order="left")
    before = grads.select("proc", "var", place.alias("_at"), (~empty).alias("_full"), "_holder")
    mine = mine.with_columns((pl.col("seq").cast(pl.Int64) * 2).alias("_at")).sort("_at")
    mine = mine.join_asof(before.sort("_at"), on="_at", by=["proc", "var"], strategy="backward", check_sortedness=False).filter("_full")
    # Held by another optimizer at that time, or by none yet, it was not this one's to clear.
    mine = mine.filter(pl.col("optimizer").is_null() | (pl.col("_holder") == pl.col("optimizer")))
    mine = mine.sort("_last").join_asof(after, on="_last", by=["proc", "var"], strategy="backward", check_sortedness=False)
    return finish(trace, mine.with_columns(((pl.col("_in") >= pl.col("seq")) & pl.col("_empty")).fill_null(value=False).alias("passed")))


def _last_within(calls: pl.DataFrame) -> pl.DataFrame:
    """These calls with `_last`, the last of them that began before this one ended: itself, where none was called within it."""
    begun = calls.select("proc", "t", pl.col("seq").alias("_last")).sort("t", "_last")
    ends = calls.with_columns((pl.col("t") + pl.col("dur")).alias("_end")).sort("_end", maintain_order=True)
    within = ends.join_asof(begun, left_on="_end", right_on="t", by="proc", strategy="backward", allow_exact_matches=False, check_sortedness=False)
    return within.with_columns(pl.max_horizontal("_last", "seq")).sort("proc", "seq", maintain_order=True)


def _gets_gradient(trace: Trace) -> pl.DataFrame:
    """The first layer has a gradient of this step when its optimizer steps.

    What comes later may be left out of the loss (a pooler, an auxiliary head); what comes first feeds all the rest. A step in which
    nothing that the optimizer holds has one says nothing of the first layer: averages of batch norms are taken so.
    """
    first = (pl.col("position") == "first") & pl.col("module").str.starts_with("torch.nn.")
    held = held_parameters(trace).filter(pl.col("optimizer").is_not_null() & ~pl.col("frozen") & (pl.col("model") != "") & first)
    steps = _frames.updates(trace).select("proc", "step", "seq", "site", "optimizer").filter(pl.col("step") >= 0)
    rows = held.join(steps, on=["proc", "optimizer"])
    fresh = _frames.used_gradients(trace).select("proc", pl.col("var").alias("grad"), "step", pl.lit(value=True).alias("_fresh"))
    holders = held_parameters(trace).select("proc", "grad", "optimizer").drop_nulls()
    rows = rows.join(fresh.join(holders, on=["proc", "grad"]), on=["proc", "step", "optimizer"], how="semi", maintain_order="left")
    rows = rows.join(fresh, on=["proc", "grad", "step"], how="left")
    grads = _frames.rows(trace).select("proc", pl.col("var").alias("grad"), "step", _frames.has(int(StateFlag.ZERO)).alias("_zero"))
    rows = rows.sort("step").join_asof(grads.sort("step"), on="step", by=["proc", "grad"], strategy="backward", check_sortedness=False)
    passed = pl.col("_fresh").fill_null(value=False) | pl.col("_zero").fill_null(value=False)
    rows = rows.with_columns(passed.alias("passed"), pl.col("name").str.replace(r"\.?[^.]*$", "").alias("path"))
    # A head or an expert that did not run has no gradient, and that is right.
    rows = rows.join(_ran(trace), on=["proc", "step", "path"], how="left", maintain_order="left")
    rows = rows.filter(pl.col("passed") | pl.col("_ran").fill_null(value=False))
    return finish(trace, _learning(trace, rows))


def _learning(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Without failures of what was frozen at that time; that it is may be seen one step late, and that it is no more in the step before."""
    told = _frames.data_by_step(trace).join(_frames.metas(trace, "requires_grad"), on="meta", how="left")
    told = told.select("proc", "var", "step", (pl.col("requires_grad") == "false").alias("_frozen")).sort("step")
    frozen = pl.lit(value=False)
    for offset in (-1, 0, 1):
        name = f"_frozen{offset}"
        rows = rows.with_columns((pl.col("step") + offset).alias("_then")).sort("_then").join_asof(
            told.rename({"_frozen": name}), left_on="_then", right_on="step", by=["proc", "var"], strategy="backward", check_sortedness=False, coalesce=False, suffix="_told"
        ).drop("_then", "step_told")  # fmt: skip
        frozen = frozen | pl.col(name).fill_null(value=False)
    return rows.filter(pl.col("passed") | ~frozen).drop(f"_frozen{offset}" for offset in (-1, 0, 1))


def _each_gets_gradient(trace: Trace) -> pl.DataFrame:
    """Gradients of all parameters that are trained, when their optimizer steps; `slot` is the name without numbers."""
    held = held_parameters(trace).filter(pl.col("optimizer").is_not_null() & ~pl.col("frozen") & (pl.col("model") != ""))
    steps = _frames.updates(trace).select("proc", "step", "seq", "site", "optimizer").filter(pl.col("step") >= 0)
    rows = held.join(steps.unique(["proc", "step", "optimizer"], keep="last", maintain_order=True), on=["proc", "optimizer"])
    fresh = _frames.used_gradients(trace).select("proc", pl.col("var").alias("grad"), "step", pl.lit(value=True).alias("_fresh"))
    rows = rows.join(fresh, on=["proc", "grad", "step"], how="left")
    empty = _frames.has(int(StateFlag.NONE))
    grads = _frames.rows(trace).select("proc", pl.col("var").alias("grad"), "step", (~empty).alias("_same"))
    rows = rows.sort("step").join_asof(grads.sort("step"), on="step", by=["proc", "grad"], strategy="backward", check_sortedness=False)
    # A gradient that no row tells of is the one before, with the same bits: a zero, or an accumulation that rests.
    passed = pl.col("_fresh").fill_null(value=False) | pl.col("_same").fill_null(value=False)
    slot = pl.col("name").str.replace_all(r"\d+", "*")
    rows = rows.with_columns(passed.alias("passed"), slot.alias("slot")).join(trace.families, on="proc", how="left")
    rows = rows.with_columns(pl.col("family").fill_null("").alias("bound"))
    return finish(trace, _learning(trace, rows))


def _ran(trace: Trace) -> pl.DataFrame:
    """Modules that were called where autograd recorded: proc, step, path (in the root), _ran."""
    forwards = [code for code, name in enumerate(trace.functions) if name.endswith(".forward")]
    calls = trace.calls.filter(pl.col("fn").is_in(forwards)).select("proc", "ctx", "args").unique()
    told = trace.contexts.filter(pl.col("grad")).select("ctx", "step")
    calls = calls.join(told, on="ctx").join(_frames.arguments(trace, calls["args"], path="0.path"), on="args")
    return calls.drop_nulls("path").select("proc", "step", "path", pl.lit(value=True).alias("_ran")).unique()



def _moved(rows: pl.DataFrame, passed: pl.Expr) -> pl.DataFrame:
    """As `decided`, and without failures that chance explains: momentum may cancel the gradient of a single number to the bit."""
    return decided(rows, passed).filter(pl.col("passed") | (pl.col("numel") >= _FEW).fill_null(value=True))



_View = Callable[[Trace], pl.DataFrame]
_VIEWS: Final[dict[tuple[str, str, str], _View]] = {
    (_frames.UPDATE, "data", "trainable"): lambda t: _frames.memo(t, "updated by call", _updated_by_call),
    (STEP, "data", "trainable"): lambda t: _frames.memo(t, "updated in step", _updated_in_step),
    (STEP, "data", "output"): lambda t: _frames.memo(t, "output learns", _output_learns),
    (ZERO_GRAD, "grad", "trainable"): lambda t: _frames.memo(t, "cleared", _cleared),
    (_frames.UPDATE, "grad", "some"): lambda t: _frames.memo(t, "optimizer has work", _optimizer_has_work),
    (STEP, "data", "held"): lambda t: _frames.memo(t, "held by optimizer", held_by_optimizer),
    (STEP, "data", "module"): lambda t: _frames.memo(t, "held by module", whole_modules),
    (STEP, "data", "twin"): lambda t: _frames.memo(t, "twins", twins, idle=one_model),
    (STEP, "grad", "input"): lambda t: _frames.memo(t, "input gets gradient", _gets_gradient),
    (STEP, "grad", "each"): lambda t: _frames.memo(t, "each gets gradient", _each_gets_gradient),
    (_checkpoints.SAVE, "data", "saved"): _checkpoints.saved,
}
