"""Modes that are set and do not hold, training that goes on in the mode of an evaluation, and masks that repeat (`relations/course`)."""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.argument.model_modes import MODE_SETTERS, TRAIN, training_forwards, wrappers
from proctor.invariants.relations.argument.tables import DROPOUTS
from proctor.invariants.relations.course.updating import examples, fine
from proctor.invariants.relations.views import containment
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

SEED: Final = "torch.manual_seed"
EVAL: Final = "torch.nn.Module.eval"
NORMALISES: Final = "torch.nn.functional.batch_norm"
_SHARES: Final = ("p.value", "1.value", "dropout_p.value")
_SWITCHES: Final = ("training.value", "2.value")


def evaluates(trace: Trace) -> pl.DataFrame:
    """One row an update, and each `eval()` that leaves the module that it was called on in training mode."""
    calls = _frames.calls_of(trace, r"torch\.nn\.Module\.eval")
    if not calls.height:
        return fine(trace, "evaluates", EVAL)
    told = _frames.arguments(trace, calls["args"], before="0.training", kind="0.type")
    after = _frames.arguments(trace, calls["ret"], after="out.training", given="out.type").rename({"args": "ret"})
    calls = calls.join(told, on="args", how="left", maintain_order="left").join(after, on="ret", how="left", maintain_order="left")
    bad = calls.filter((pl.col("after") == "true") & (pl.col("kind") == pl.col("given")))
    bad = bad.with_columns(pl.col("step").clip(lower_bound=0)).select("proc", "step", "seq", "site", pl.format("{} is in training mode after its eval()", "kind").alias("_seen"), pl.col("kind").alias("_variable"))
    return examples(trace, "evaluates", bad, function=EVAL)


def resumes(trace: Trace) -> pl.DataFrame:
    """One row an update, and each forward that trains in the mode of an evaluation that was set since the model trained in training mode.

    Only of models that drop out or normalise by batches in training: for others the mode makes no difference.
    """
    fed = training_forwards(trace).sort("proc", "seq")
    if fed["passed"].all():
        return fine(trace, "resumes", MODEL_CALL)
    mine = ["proc", "class"]
    fed = fed.with_columns(pl.col("passed").cum_max().over(mine).fill_null(value=False).alias("_began"))
    bad = fed.filter(~pl.col("passed") & pl.col("_began")).join(chancy(trace), on=mine, how="semi", maintain_order="left")
    modes = modes_set(trace)
    bad = bad.sort("seq").join_asof(modes.sort("seq"), on="seq", by=mine, strategy="backward", check_sortedness=False).sort("proc", "seq")
    bad = bad.filter((pl.col("_mode") == "eval").fill_null(value=False)).unique(["proc", "step"], keep="first", maintain_order=True)
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} began to train in training mode and now trains in evaluation mode", "class").alias("_seen"), pl.col("class").alias("_variable"))
    return examples(trace, "resumes", bad, function=MODEL_CALL)


def modes_set(trace: Trace) -> pl.DataFrame:
    """Modes that whole models are set to: proc, class (of a wrapper without a mode that of its model), seq, _mode."""
    calls = _frames.calls_of(trace, *(name.replace(".", r"\.") for name in sorted(MODE_SETTERS)))
    found, within = [], wrappers(trace) if calls.height else {}
    for proc, seq, fn, args in calls.select("proc", "seq", "fn", "args").iter_rows():
        given = trace.features[args]
        on = trace.functions[fn] == TRAIN and given.get("1.value", given.get("mode.value", True)) is True
        if given.get("0.path", "") == "":
            kind = str(given.get("0.type"))
            found.append((proc, within.get((proc, kind), kind), seq, "train" if on else "eval"))
    return pl.DataFrame(found, schema={"proc": pl.UInt16, "class": pl.String, "seq": pl.UInt32, "_mode": pl.String}, orient="row")


def chancy(trace: Trace) -> pl.DataFrame:
    """Classes in a call of which something drops out, or normalises by the batch: proc, class."""
    return _frames.memo(trace, "classes whose mode matters", _chancy)


def _chancy(trace: Trace) -> pl.DataFrame:
    calls = trace.calls
    codes = [code for code, name in enumerate(trace.functions) if name in DROPOUTS or name == NORMALISES]
    candidates = calls.with_row_index("row").filter(pl.col("fn").is_in(codes)).select("row", "fn", "args")
    distinct = candidates.select("fn", "args").unique(maintain_order=True)
    acting = distinct.filter(pl.Series([_acts(trace, fn, args) for fn, args in distinct.iter_rows()], dtype=pl.Boolean))
    rows = candidates.join(acting, on=["fn", "args"], how="semi")["row"].to_numpy()
    around = calls[containment.around(trace, rows)].select("proc", "args").unique()
    told = _frames.arguments(trace, around["args"], **{"class": "0.type"})
    return around.join(told, on="args", how="inner").select("proc", "class").drop_nulls().unique()


def _acts(trace: Trace, fn: int, args: int) -> bool:
    given = trace.features[args]
    if trace.functions[fn] == NORMALISES:
        return given.get("training.value", given.get("5.value")) is True
    if not any(isinstance(share := given.get(path), float | int) and share > 0 for path in _SHARES):
        return False
    return next((given[path] for path in _SWITCHES if path in given), True) is True


def restored(trace: Trace, evaluations: pl.DataFrame) -> pl.DataFrame:
    """One row an update, and each `train()` that follows an evaluation in training mode, of a model that nothing has taken out of it.

    Who sets the model to train again after an evaluation has meant to set it to evaluate.

    Args:
        evaluations: `choices.evaluations`.
    """
    if not evaluations.height:
        return fine(trace, "restored", EVAL)
    told = modes_set(trace).select("proc", "class", "_mode", "seq", pl.col("seq").alias("_set")).sort("seq")
    runs = evaluations.sort("seq").join_asof(told, on="seq", by=["proc", "class"], strategy="forward", check_sortedness=False)
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_backward")).sort("seq")
    runs = runs.sort("seq").join_asof(backwards, on="seq", by="proc", strategy="forward", check_sortedness=False)
    runs = runs.filter((pl.col("_mode") == "train") & (pl.col("_backward").is_null() | (pl.col("_set") < pl.col("_backward"))))
    bad = runs.sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} evaluates in training mode, and is then set to train, as it was all along", "class").alias("_seen"), pl.col("class").alias("_variable"))
    return examples(trace, "restored", bad, function=EVAL)


def masks(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step in which a dropout of training begins at a seed that one of an earlier step began at.

    A model that is made anew may begin with the old seed; a second pass of a checkpointed function has to.
    """
    seeds = _frames.calls_of(trace, SEED.replace(".", r"\."))
    if not seeds.height:
        return fine(trace, "masks", SEED)
    told = _frames.arguments(trace, seeds["args"], first="0.value", named="seed.value")
    seeds = seeds.join(told, on="args", how="left", maintain_order="left").with_columns(pl.coalesce("first", "named").alias("_seed"))
    seeds = seeds.drop_nulls("_seed").select("proc", "seq", "step", "_seed", pl.col("seq").alias("_set"), pl.col("step").alias("_in")).drop("step").sort("seq")
    codes = [code for code, name in enumerate(trace.functions) if name in DROPOUTS]
    told_of = trace.contexts.filter(~pl.col("recompute")).select("ctx", "step")
    drops = trace.calls.filter(pl.col("fn").is_in(codes)).join(told_of, on="ctx").filter(pl.col("step") >= 0)
    acting = drops.select("fn", "args").unique()
    acting = acting.filter(pl.Series([_acts(trace, fn, args) for fn, args in acting.iter_rows()], dtype=pl.Boolean))
    drops = drops.join(acting, on=["fn", "args"], how="semi").sort("seq").join_asof(seeds, on="seq", by="proc", strategy="backward", check_sortedness=False)
    # The first that follows its seed, in one step.
    drops = drops.filter(pl.col("_in") == pl.col("step")).unique(["proc", "_set"], keep="first", maintain_order=True)
    if not drops.height:
        return fine(trace, "masks", SEED)
    drops = _sightings.with_session(trace, drops.sort("proc", "seq"))
    first = pl.col("step").min().over("proc", "session", "_seed")
    bad = drops.filter(pl.col("step") > first).unique(["proc", "step"], keep="first", maintain_order=True)
    bad = bad.hstack([_frames.function_names(trace, bad["fn"]).alias("_variable")])
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} draws its mask behind torch.manual_seed({}), as in an earlier step", "_variable", "_seed").alias("_seen"), "_variable")
    return examples(trace, "masks", bad, function=SEED)
