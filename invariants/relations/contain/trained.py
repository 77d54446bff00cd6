"""What a program trains: its parameters, who holds them, which of them a step pushes, and which of them changed.

`changes` asks for these views. A row is a parameter in a process, or in one of its steps:

    proc 0, var 7, name "fc.weight", optimizer "#0", frozen false, numel 4096
"""

from __future__ import annotations

import json
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_PLAIN: Final = "torch.optim.sgd.SGD"
_KEEP: Final = 8  # passing examples of one parameter in one process
# A gradient this much smaller than its parameter may not move it: float32 keeps 6e-8 of a value, times a small rate.
_MIN_RATIO: Final = 1e-4
_HALF_DIGIT: Final = 2.0**-23  # of a float32: a change that is smaller may be none
_LEAST_MEAN: Final = 1e-2  # of an element's gradient and its size, as optimizers with moments see them
_LOW_PRECISION: Final = ("bfloat16", "float16")
_SAID: Final = ("requires_grad", "optimizer", "lr_zero", "dtype", "wrapper", "ndim", "shape")


def parameters(trace: Trace) -> pl.DataFrame:
    """Parameters: var (of the data), grad (code of the gradient), model, name, module, kind, position."""
    known = trace.variables.filter((pl.col("role") == "parameter") & (pl.col("alias") == ""))
    data = known.filter(pl.col("attr") == "data").drop("attr", "role", "alias")
    grads = known.filter(pl.col("attr") == "grad").select(pl.col("var").alias("grad"), "model", "name", "module", "kind", "position")
    return data.join(grads, on=["model", "name", "module", "kind", "position"], how="left")


def held_parameters(trace: Trace) -> pl.DataFrame:
    """What each process knows of its parameters over all steps: proc, var, …, frozen, optimizer, numel."""
    return _frames.memo(trace, "held", _find_held)


def _find_held(trace: Trace) -> pl.DataFrame:
    told = _frames.metas(trace, *_SAID)
    sizes = [_numel(s) for s in told["shape"].to_list()]
    told = told.with_columns(pl.Series("numel", sizes, dtype=pl.Int64))
    seen = trace.states.select("proc", "var", "meta").unique(maintain_order=True).join(told, on="meta", how="left", maintain_order="left")
    held = seen.group_by("proc", "var", maintain_order=True).agg(
        (pl.col("requires_grad") == "false").all().alias("frozen"),
        pl.col("optimizer").last(),  # what an optimizer was made with, and holds no more, is not its own
        pl.col("numel").max(),
        pl.col("dtype", "wrapper").last(),
    )
    held = held.join(parameters(trace), on="var", maintain_order="left")
    model = pl.col("model") != ""
    # Masters: optimizers hold copies that no model owns, and models get their values from them.
    return held.with_columns((pl.col("optimizer").is_not_null() & model).any().over("proc").alias("covered"))


def _numel(shape: str | None) -> int:
    n = 1
    for size in json.loads(shape) if shape else []:
        n *= int(size)
    return n


def changed_data(trace: Trace) -> pl.DataFrame:
    """Steps in which a parameter changed: proc, var, step, changed."""
    return _frames.data_by_step(trace).filter("changed").select("proc", "var", "step", "changed")


def trainable(trace: Trace) -> pl.DataFrame:
    """Parameters that a step should change: proc, var, step, update, site, seq, optimizer and the fields."""
    # A parameter in no optimizer is expected to move only where that is how the program works: masters.
    expected = pl.col("optimizer").is_not_null() | ((pl.col("model") != "") & ~pl.col("covered"))
    return _frames.memo(trace, "trainable", lambda t: pushed(t).filter(expected))


def pushed(trace: Trace) -> pl.DataFrame:
    """Parameters with a gradient in a step that updates something: as `trainable`, in an optimizer or not."""
    return _frames.memo(trace, "pushed", _find_pushed)


def _find_pushed(trace: Trace) -> pl.DataFrame:
    used = _frames.used_gradients(trace).select("proc", "var", "step", "flags", "meta", "norm", "update", "site", "seq")
    used = pl.concat([used, _unused_gradients(trace).select(used.columns)])
    broken = used.filter(_frames.has(int(StateFlag.NONFINITE))).select("proc", "step").unique()
    used = used.filter(~_frames.has(int(StateFlag.ZERO))).join(broken, on=["proc", "step"], how="anti", maintain_order="left")
    told = _frames.metas(trace, *_SAID).drop("shape")
    used = used.join(told, on="meta", how="left", maintain_order="left").filter(
        pl.col("requires_grad") == "true"
    )
    held = held_parameters(trace).select("proc", "var", "grad", "model", "name", "module", "kind", "position", "covered", "numel")
    used = used.rename({"var": "grad"}).join(held, on=["proc", "grad"], maintain_order="left")
    sizes = _frames.data_by_step(trace).select("proc", "var", "step", pl.col("norm").alias("_size"), "meta").sort("step")
    used = used.drop("meta").sort("step").join_asof(sizes, on="step", by=["proc", "var"], strategy="backward", check_sortedness=False)
    # The rate that an update used is told by the values after it.
    idle = _frames.metas(trace, "lr_zero").filter(pl.col("lr_zero") == "true")
    used = used.join(idle, on="meta", how="anti", maintain_order="left")
    return _scheduled_inside(trace, with_kind(trace, used.join(_frames.metas(trace, "rate"), on="meta", how="left", maintain_order="left")))


def _scheduled_inside(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Without updates of an optimizer of the program's own class that change nothing, where others of it do: its rate may be 0 in its own way, as when a warm-up begins."""
    own = ~pl.col("_kind").str.starts_with("torch.optim.").fill_null(value=True)
    mine = rows.filter(own).select("proc", "optimizer", "step", "var").drop_nulls("optimizer")
    moved = mine.join(changed_data(trace), on=["proc", "var", "step"], how="semi").select("proc", "optimizer", "step").unique()
    still = mine.select("proc", "optimizer", "step").unique().join(moved, on=["proc", "optimizer", "step"], how="anti").join(moved, on=["proc", "optimizer"], how="semi")
    return rows.join(still, on=["proc", "optimizer", "step"], how="anti", maintain_order="left")


def with_kind(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with the class of their optimizer."""
    kinds = _frames.updates(trace).select("proc", "optimizer", pl.col("kind").alias("_kind")).drop_nulls().unique(["proc", "optimizer"])
    return rows.join(kinds, on=["proc", "optimizer"], how="left", maintain_order="left")


def _unused_gradients(trace: Trace) -> pl.DataFrame:
    """Gradients of processes that compute them in several steps and never update: proc, var, step, flags, …"""
    updated = _frames.updates(trace)["proc"].unique()
    grads = _frames.rows(trace).filter(~pl.col("proc").is_in(updated.implode()) & ~_frames.has(int(StateFlag.NONE)))
    grads = grads.join(trace.variables.filter(pl.col("attr") == "grad").select("var"), on="var", how="semi").filter(pl.col("step") >= 0)
    grads = grads.group_by("proc", "var", "step", maintain_order=True).agg(pl.col("flags", "meta", "norm", "seq").last())
    grads = grads.filter(pl.col("step").n_unique().over("proc") > 2)
    return grads.with_columns(pl.lit(None, dtype=pl.UInt32).alias("update"), pl.lit(0, dtype=pl.UInt32).alias("site"))


def decided(rows: pl.DataFrame, passed: pl.Expr) -> pl.DataFrame:
    """Without failures that rounding explains."""
    small = pl.col("norm") < _MIN_RATIO * pl.col("_size")
    vector = pl.col("ndim").cast(pl.Int32) < 2
    coarse = pl.col("dtype").is_in(_LOW_PRECISION) & vector
    explained = small.fill_null(value=True) | coarse.fill_null(value=True) | _rounded(vector).fill_null(value=False)
    return rows.with_columns(passed.alias("passed")).filter(pl.col("passed") | ~explained)


def _rounded(vector: pl.Expr) -> pl.Expr:
    """Whether the learning rate is so small that no element may move: at the beginning of a warm-up, or the end of a decay.

    All elements of a vector may have one size, as those of a norm have at first; of a matrix some are small. An update of SGD is as large as its gradient; of others the rate tells.
    """
    rate = 10.0 ** pl.col("rate").cast(pl.Int32, strict=False)
    moves = pl.when(pl.col("_kind") == _PLAIN).then(pl.col("norm")).otherwise(_LEAST_MEAN * pl.col("numel").sqrt())
    return rate * moves * pl.when(vector).then(1).otherwise(pl.col("numel")) < _HALF_DIGIT * pl.col("_size")


def finish(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """The columns of a view; of what passed again and again the first rows."""
    rows = rows.sort("step", "proc", "var", maintain_order=True)
    rows = rows.filter(~pl.col("passed") | (pl.col("passed").cum_sum().over("proc", "name", _frames.news(trace)) <= _KEEP))
    rows = rows if "_kind" in rows.columns else with_kind(trace, rows)
    extra = [c for c in ("family", "_cause", "bound", "slot") if c in rows.columns]
    return rows.select(
        "proc", "step", "seq", pl.col("site").fill_null(0), "passed", "module", "kind", "position", "dtype", "wrapper", *extra,
        pl.when(pl.col("optimizer").is_null()).then(pl.lit("false")).otherwise(pl.lit("true")).alias("in_optimizer"),
        pl.col("_kind").alias("optimizer"),
        pl.when(pl.col("step") > 0).then(pl.lit("later")).otherwise(pl.lit("first")).alias("first"),
        pl.col("name").alias("_name"), pl.col("module").alias("_module"),
    )  # fmt: skip
