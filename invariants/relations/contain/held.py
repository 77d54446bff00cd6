"""Whether an optimizer holds what gets gradients: views of `changes` on holes in a model, in a layer, and on models of one kind.

Each takes rows of `trained.pushed` (a parameter with a gradient in a step that updates something) and gives an example a row:

    step 0, name "head.weight", passed false: it got a gradient, no optimizer holds it, and nothing else changed it
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.contain.trained import decided, finish, pushed
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace

_SEVERAL: Final = 3  # steps


def held_by_optimizer(trace: Trace) -> pl.DataFrame:
    """What gets gradients among parameters that an optimizer holds is held, too, or changed by other means.

    To leave out what comes first, or all but a small part, is a way to fine-tune; a hole is not.
    """
    mine = ["proc", "model"]
    rows = pushed(trace).filter((pl.col("model") != "") & pl.col("covered") & pl.col("update").is_not_null())
    inside = pl.col("optimizer").is_not_null()
    sizes = rows.group_by(*mine, "var").agg(
        inside.any().alias("_in"), (~inside).any().alias("_out"), pl.col("numel").max(), (pl.col("position") != "middle").first().alias("_end")
    )
    sizes = sizes.with_columns((pl.col("_in") | ~pl.col("_out")).alias("_in"))
    models = sizes.group_by(mine).agg(
        pl.col("var").filter("_in").min().alias("_first"),
        pl.col("numel").filter("_in").sum().alias("_held"),
        pl.col("numel").filter("_out").sum().alias("_loose"),
        (pl.col("_in") | ~pl.col("_end")).all().alias("_ends"),
    )
    rows = rows.join(models, on=mine, how="left", maintain_order="left")
    rows = rows.join(_moved_loose(trace), on=["proc", "var", "step"], how="left", maintain_order="left")
    passed = inside | pl.col("changed").fill_null(value=False)
    hole = (pl.col("_first") < pl.col("var")) & (pl.col("_ends") | (pl.col("_held") >= pl.col("_loose")))
    whole = _frames.whole_steps(trace).with_columns(pl.lit(value=True).alias("_whole"))
    rows = rows.join(whole, on=["proc", "step"], how="left", maintain_order="left")
    rows = rows.filter(passed | (hole & pl.col("_whole").fill_null(value=False) & _again()))
    return finish(trace, decided(rows, passed))


def _again() -> pl.Expr:
    """Not the first step in which the parameter gets a gradient: programs that have an optimizer for each parameter make it then, one behind the other."""
    return pl.col("step") > pl.col("step").min().over("proc", "var")


def _moved_loose(trace: Trace) -> pl.DataFrame:
    """Steps in which a tensor changed that no optimizer holds: proc, var, step, changed."""
    # Two tensors may have one name, the one that the optimizer holds and the one that took its place.
    loose = _frames.rows(trace).join(_frames.metas(trace, "optimizer"), on="meta", how="left", maintain_order="left")
    loose = loose.filter(pl.col("optimizer").is_null()).select(
        "proc", "var", "step", (pl.col("fp") != pl.col("fp").shift(1)).over("proc", "var").fill_null(value=False).alias("changed")
    )
    return loose.filter("changed").unique()


def whole_modules(trace: Trace) -> pl.DataFrame:
    """Of one module, an optimizer holds all parameters that get gradients in its updates, or none.

    Only modules of torch, of which part is held and part is not: nobody fine-tunes a weight and forgets its bias on purpose without freezing it.
    """
    rows = pushed(trace).filter((pl.col("model") != "") & pl.col("covered") & pl.col("update").is_not_null() & pl.col("module").str.starts_with("torch.nn."))
    inside = pl.col("optimizer").is_not_null()
    path = [*("proc", "model", "step"), pl.col("name").str.replace(r"\.?[^.]*$", "").alias("_path")]
    rows = rows.join(_moved_loose(trace), on=["proc", "var", "step"], how="left", maintain_order="left").filter(pl.len().over(path) > 1)
    passed = inside | pl.col("changed").fill_null(value=False)
    # Where an optimizer takes all of one kind only, or leaves one kind out everywhere, that is meant.
    kinds = inside.any().over("proc", "kind") & (pl.col("kind").n_unique().over("proc") > 1)
    rows = rows.join(_frames.whole_steps(trace).with_columns(pl.lit(value=True).alias("_whole")), on=["proc", "step"], how="left", maintain_order="left")
    rows = rows.filter(passed | (inside.any().over(path) & kinds & pl.col("_whole").fill_null(value=False) & _again()))
    return finish(trace, decided(rows, passed))


def twins(trace: Trace) -> pl.DataFrame:
    """Of several models of one class, an optimizer holds each that gets gradients in its updates, if it holds one.

    The second generator or critic that was forgotten. A copy of one that is held (a target, a teacher of the same values) is no example, nor is a class
    with a model that is called in evaluation mode: a trained one that judges another.
    """
    rows = pushed(trace).filter((pl.col("model") != "") & pl.col("covered") & pl.col("update").is_not_null())
    rows = rows.with_columns(pl.col("model").str.replace(r"#\d+$", "").alias("_class"), pl.col("optimizer").is_not_null().alias("_in"))
    rows = rows.join(_frames.first_values(trace).select("proc", "var", pl.col("fp").alias("_first")), on=["proc", "var"], how="left", maintain_order="left")
    parts = rows.unique(["proc", "var"], maintain_order=True).sort("proc", "model", "name")
    models = parts.group_by("proc", "_class", "model", maintain_order=True).agg(
        pl.col("_in").any(), pl.col("name").str.replace(r"^[^.]*#\d+\.", ""), pl.col("numel"), pl.col("_first"), pl.col("_first").is_null().any().alias("_unknown")
    )
    other = pl.col("model") != pl.col("model_right")
    pairs = models.filter(~pl.col("_in") & ~pl.col("_unknown")).join(models.filter("_in"), on=["proc", "_class", "name", "numel"]).filter(other)
    copies = pairs.filter(pl.col("_first") == pl.col("_first_right")).select("proc", "model")
    loose = pairs.select("proc", "_class", "model").unique().join(copies, on=["proc", "model"], how="anti").join(_evaluated(trace), on=["proc", "_class"], how="anti")
    rows = rows.filter(pl.col("_in").any().over("proc", "_class") & (pl.col("model").n_unique().over("proc", "_class") > 1))
    rows = rows.join(loose.with_columns(pl.lit(value=True).alias("_loose")), on=["proc", "_class", "model"], how="left", maintain_order="left")
    moved = _moved_loose(trace).select("proc", "var").unique().with_columns(pl.lit(value=True).alias("_moved"))
    rows = rows.join(moved, on=["proc", "var"], how="left", maintain_order="left")
    rows = rows.with_columns((pl.col("_moved").fill_null(value=False).any() | (pl.col("step").n_unique() < _SEVERAL)).over("proc", "model").alias("_used"))
    rows = rows.filter("_in" | (pl.col("_loose").fill_null(value=False) & ~pl.col("_used")))
    return finish(trace, decided(rows, pl.col("_in")))


def _evaluated(trace: Trace) -> pl.DataFrame:
    """Classes of which a model is called in evaluation mode: proc, _class."""
    forwards = [code for code, name in enumerate(trace.functions) if name.endswith(".forward")]
    calls = trace.calls.filter(pl.col("fn").is_in(forwards)).select("proc", "args").unique()
    calls = calls.join(_frames.arguments(trace, calls["args"], _class="0.type", _training="0.training"), on="args")
    return calls.filter(pl.col("_training") == "false").select("proc", "_class").unique()
