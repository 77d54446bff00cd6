"""In which mode models run: in the forwards that train them, and where there are no gradients."""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.argument import trained as _trained
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import (
    cached,
    calls_of,
    circumstances_of,
    codes_where,
    features_of,
    programs_of,
)
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

TRAIN: Final = "torch.nn.Module.train"
MODE_SETTERS: Final = frozenset({TRAIN, "torch.nn.Module.eval"})


def _modes_set(trace: Trace, forwards: pl.DataFrame) -> pl.DataFrame:
    """Where a model as a whole is set to evaluate, and where a part of one is set to train: proc, _at, part."""
    calls = calls_of(trace).filter(pl.col("fn").is_in(codes_where(trace, lambda n: n in MODE_SETTERS)))
    wholes = set(forwards.select("proc", "class").unique().iter_rows()) | wrappers(trace).keys()
    found: list[tuple[int, int, bool]] = []
    for proc, seq, fn, args in calls.select("proc", "seq", "fn", "args").iter_rows():
        given = trace.features[args]
        on = trace.functions[fn] == TRAIN and given.get("1.value", given.get("mode.value", True)) is True
        whole = given.get("0.path", "") == "" and (proc, given.get("0.type")) in wholes
        if on != whole:
            found.append((proc, seq, on))
    return pl.DataFrame(found, schema={"proc": pl.UInt16, "_at": pl.UInt32, "part": pl.Boolean}, orient="row").sort("_at")


def _without_parts_that_train(fed: pl.DataFrame, modes: pl.DataFrame) -> pl.DataFrame:
    """Without forwards of a model that evaluates but for a part, which was set to train after that."""
    told = fed.sort("_at").join_asof(modes, on="_at", by="proc", strategy="backward", check_sortedness=False)
    return told.filter((pl.col("_seen") == "true") | ~pl.col("part").fill_null(value=False)).drop("part")


def _wrapped_modes(trace: Trace, flags: pl.DataFrame) -> pl.DataFrame:
    """Flag and class of the first module that a call calls: a wrapper without a flag of its own trains when that does."""
    told = flags.filter(pl.col("0.training").is_not_null()).select(
        pl.col("code").alias("args"), pl.col("0.training").alias("_inner"), pl.col("0.type").alias("_class")
    )
    inner = trace.calls.filter(pl.col("parent") > 0).select("proc", pl.col("parent").alias("seq"), pl.col("seq").alias("_at"), "args")
    return inner.join(told, on="args").sort("_at").unique(["proc", "seq"], keep="first", maintain_order=True).drop("args", "_at")


def _models(trace: Trace, forwards: pl.DataFrame) -> pl.DataFrame:
    """Forwards of what has parameters, wraps it, or calls at once a module that has, where anything has: a loss that is a module runs last before each backward, and never evaluates."""
    known = _frames.owned(trace).filter(pl.col("role") == "parameter").select(pl.col("model").str.split("#").list.first().alias("class"), "var")
    held = trace.states.select("proc", "var").unique().join(known, on="var").select("proc", "class")
    wrappers = trace.states.select("proc", "meta").unique().join(_frames.metas(trace, "root"), on="meta").select("proc", pl.col("root").alias("class"))
    held = pl.concat([held, wrappers.drop_nulls()]).unique()
    for of, found in (("class", "_owns"), ("_class", "_wraps")):
        forwards = forwards.join(held.select("proc", pl.col("class").alias(of), pl.lit(value=True).alias(found)), on=["proc", of], how="left", maintain_order="left")
    forwards = forwards.with_columns(pl.any_horizontal(pl.col("_owns", "_wraps").fill_null(value=False)).alias("_owner"))
    return forwards.filter(pl.col("_owner") | ~pl.col("_owner").any().over("proc")).drop("_owns", "_wraps", "_owner", "_class")


def _forwards(trace: Trace) -> pl.DataFrame:
    """Calls of outermost modules that have a mode, with it (_seen), their class, grad, phase, and the class of a wrapper that has none itself."""
    return cached(trace, "forwards with a mode", lambda: _build_forwards(trace))


def _build_forwards(trace: Trace) -> pl.DataFrame:
    flags = features_of(trace).filter(pl.col("name").is_in(["0.training", "0.type"]))
    flags = flags.pivot(
        on="name",
        on_columns=["0.training", "0.type"],
        index="code",
        values="value",
        aggregate_function="first",
    )
    return (
        calls_of(trace)
        .filter("root")
        .join(flags.rename({"code": "args", "0.training": "_seen", "0.type": "class"}), on="args", how="left")
        .join(_wrapped_modes(trace, flags), on=["proc", "seq"], how="left", maintain_order="left")
        .with_columns(
            pl.coalesce("_seen", "_inner").alias("_seen"),
            pl.when(pl.col("_seen").is_null()).then("class").alias("_type"),
            pl.when(pl.col("_seen").is_null()).then("_class").otherwise("class").alias("class"),
        )
        .drop("_inner")
        .filter(pl.col("_seen").is_not_null())
        .rename({"_type": "wrapper"})
        .join(circumstances_of(trace).select("circ", "grad", "phase"), on="circ")
    )


def wrappers(trace: Trace) -> dict[tuple[int, str], str]:
    """Classes without a mode of their own, as `torch.compile` makes one, by process and class: the class of what they call."""
    told = _forwards(trace).filter(pl.col("wrapper").is_not_null()).select("proc", "wrapper", "class").drop_nulls().unique(["proc", "wrapper"], keep="first", maintain_order=True)
    return {(proc, wrapper): kind for proc, wrapper, kind in told.iter_rows()}


def _of_models(trace: Trace) -> pl.DataFrame:
    """Those of `_forwards` that are of models, as `argument` tells them."""
    return cached(trace, "forwards of models", lambda: _build_of_models(trace))


def _build_of_models(trace: Trace) -> pl.DataFrame:
    return (
        _models(trace, _forwards(trace))
        .with_columns(
            pl.lit(MODEL_CALL).alias("function"),
            pl.lit("0.training").alias("feature"),
            pl.lit("").alias("caller"),
            pl.when(pl.col("class").n_unique().over("proc") == 1)
            .then(pl.lit("one"))
            .otherwise(pl.lit("several"))
            .alias("roots"),
        )
        .join(programs_of(trace).select("proc", pl.col("program").alias("own")), on="proc")
    )


def _training(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows (_at is the forward, seq the backward behind it) without those that evaluate and train nothing, each forward once."""
    if not (rows["_seen"] == "false").any():
        return rows.unique(["proc", "_at"], keep="first", maintain_order=True)
    forwards = _forwards(trace).filter(pl.col("grad") == "true").select("proc", "seq", "class", "_seen", "args")
    models = _of_models(trace).select("proc", "class").unique().with_columns(model=True)
    told = forwards.with_columns(_trained.have_parameters(trace, forwards).alias("has")).join(models, on=["proc", "class"], how="left", maintain_order="left")
    told = told.with_columns(pl.col("model").fill_null(value=False))
    rows = _trained.training(trace, rows, told).unique(["proc", "_at"], keep="first", maintain_order=True)
    return _without_parts_that_train(rows, _modes_set(trace, _of_models(trace)))


def model_modes(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """Training flag of the outermost module in the last forward before each backward, and in those without gradients; None if nothing ran."""
    forwards = _of_models(trace)
    if not forwards.height:
        return None
    differentiated = forwards.filter(pl.col("grad") == "true")
    fed = _trained.backwards(trace).sort("seq").join_asof(
        differentiated.rename({"seq": "_at"}).with_columns(pl.col("_at").alias("seq")).sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False
    ).filter(pl.col("function").is_not_null())  # fmt: skip
    fed = fed.with_columns((pl.col("_seen") == "true").alias("passed"), pl.lit("").alias("program"))
    trained = fed.select("proc", "class").unique()
    free = forwards.filter((pl.col("grad") == "false") & (pl.col("step") >= 0)).join(
        trained, on=["proc", "class"], how="semi"
    )
    free = free.with_columns((pl.col("_seen") == "false").alias("passed"), pl.col("own").alias("program"))
    return _training(trace, fed), free


def training_forwards(trace: Trace) -> pl.DataFrame:
    """Every forward of a model, with gradients and in a step, that trains it, and not the last before each backward alone: proc, class, seq (of the forward), step, site, passed."""
    forwards = _of_models(trace).filter((pl.col("grad") == "true") & (pl.col("phase") == "train") & (pl.col("step") >= 0))
    if not (forwards["_seen"] == "false").any():
        return forwards.with_columns(passed=True)
    back = _trained.backwards(trace)
    forwards = forwards.with_columns(pl.col("seq").alias("_at")).sort("_at")
    rows = forwards.join_asof(back.rename({"seq": "_back"}).sort("_back"), left_on="_at", right_on="_back", by="proc", strategy="forward", check_sortedness=False, coalesce=False)
    rows = rows.drop_nulls("_back").with_columns(pl.col("_back").alias("seq"), (pl.col("_seen") == "true").alias("passed"))
    return _training(trace, rows).with_columns(pl.col("_at").alias("seq"))
