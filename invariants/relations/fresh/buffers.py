"""Buffers that must follow what the model sees, and those that must stay (`relations/fresh.py`)."""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import without_buffers
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

SYNC: Final = "torch.nn.parallel.DistributedDataParallel._pre_forward"
_NO_VALUE: Final = int(StateFlag.NONE | StateFlag.UNHASHED)


def changes(trace: Trace) -> pl.DataFrame:
    """Per buffer and step in which its module trains, whether it changed; `mode` moves: passed if so, still: if not."""
    return _frames.memo(trace, "buffer changes", _changes, idle=without_buffers)


def _changes(trace: Trace) -> pl.DataFrame:
    known = trace.variables.filter(pl.col("role") == "buffer").select("var", "name", "module", "kind")
    rows = _frames.rows(trace).join(known, on="var", how="semi")
    changed = (
        rows.filter("fresh")
        .select("proc", "var", "step", "seq")
        .unique(["proc", "var", "step"], keep="first", maintain_order=True)
    )
    held = rows.group_by("proc", "var").agg(pl.col("step").min().alias("_from")).join(known, on="var")
    # A module may be in evaluation while the model trains, or left out of a step.
    ran = _training_calls(trace)
    held = held.with_columns(pl.col("name").str.replace(r"\.?[^.]*$", "").alias("path"))
    updates = _frames.updates(trace).select("proc", "step").unique()
    # A call of a whole model does not tell which of several of one class it was.
    several = held.filter(pl.col("name").str.contains(r"#\d+\.")).select("proc", pl.lit("").alias("path")).unique()
    held = held.join(several, on=["proc", "path"], how="anti")
    # Nor does a call of a part, where two models have it at one place, as an autoencoder and what is made of its encoder.
    held = held.filter(pl.col("var").n_unique().over("proc", "name", "module") == 1)
    steps = held.join(ran, on=["proc", "module", "path"]).join(updates, on=["proc", "step"], how="semi")
    steps = steps.join(_frames.whole_steps(trace), on=["proc", "step"], how="semi").filter(
        pl.col("step") > pl.col("_from")
    )
    found = steps.join(changed, on=["proc", "var", "step"], how="left").with_columns(
        pl.col("seq").is_not_null().alias("_changed")
    )
    # What moved last in an evaluation is made of parameters, as spectral norm's weight is: nothing has changed them since.
    last = rows.filter("fresh").select("proc", "var", pl.col("step") + 1, (pl.col("phase") == "eval").alias("_evaluated")).unique(["proc", "var", "step"], keep="last", maintain_order=True)
    found = found.sort("step").join_asof(last.sort("step"), on="step", by=["proc", "var"], strategy="backward", check_sortedness=False)
    found = found.filter(pl.col("_changed") | ~pl.col("_evaluated").fill_null(value=False)).drop("_evaluated")
    families = trace.families
    found = (
        found.join(families, on="proc", how="left")
        .with_columns(
            pl.concat_str("module", pl.lit("."), "kind").alias("what"),
            pl.col("name").alias("_variable"),
        )
        .sort("proc", "var", "step")
    )
    # What torch's own classes keep means the same everywhere; a class of the user's is of its program.
    library = pl.col("module").str.starts_with("torch.nn.")
    found = found.with_columns(
        pl.when(library).then(pl.lit(None, dtype=pl.String)).otherwise("family").alias("family")
    )
    each = _each(found)
    lately = pl.col("_changed") | pl.col("_changed").shift(1).over("proc", "var").fill_null(value=False)  # what is counted may come out as it was
    moves = pl.concat([found.with_columns(pl.col("_changed").alias("passed")), each.with_columns(lately.alias("passed"))])
    still = pl.concat([found, each]).with_columns((~pl.col("_changed")).alias("passed"))
    group = ["proc", "var", "what"]
    return pl.concat(
        [
            _sightings.example(
                _sightings.thin(moves, group),
                mode="moves",
                _expected=pl.lit("changed by the step"),
                _seen=pl.lit("the value of the step before"),
                _function=pl.concat_str("module", pl.lit(".forward")),
            ),
            _sightings.example(
                _sightings.thin(still, group),
                mode="still",
                _expected=pl.lit("the value that it began with"),
                _seen=pl.lit("changed by the step"),
                _function=pl.concat_str("module", pl.lit(".forward")),
            ),
        ]
    )


OF: Final = " of "


def _each(found: pl.DataFrame) -> pl.DataFrame:
    """The same of each module by itself, where a class of the user's has several with this buffer: one layer may be told to leave alone what the others move.

    Without the first step: what is moved inside of an update is seen at the next.
    """
    found = found.filter(pl.int_range(pl.len()).over("proc", "var") > 0)
    several = pl.col("var").n_unique().over("proc", "what") > 1
    return found.filter(several & ~pl.col("module").str.starts_with("torch.nn.")).with_columns(pl.concat_str("what", pl.lit(OF), "path").alias("what"))


def for_all(what: str) -> str:
    """What a rule speaks of, without the one module that it may be about."""
    return what.partition(OF)[0]


def _training_calls(trace: Trace) -> pl.DataFrame:
    """Steps in which a module was called in training mode alone: proc, module (class), path, step."""
    codes = [code for code, name in enumerate(trace.functions) if name.endswith(".forward")]
    calls = trace.calls.filter(pl.col("fn").is_in(codes)).join(
        trace.contexts.select("ctx", "step", "phase"), on="ctx", how="left"
    )
    calls = calls.filter((pl.col("phase") == "train") & (pl.col("step") >= 0))
    kinds = {
        code: name.removesuffix(".forward")
        for code, name in enumerate(trace.functions)
        if name.endswith(".forward")
    }
    calls = calls.join(
        _frames.arguments(trace, calls["args"], training="0.training", path="0.path"), on="args", how="left"
    )
    calls = calls.with_columns(
        pl.col("fn").replace_strict(kinds, default="", return_dtype=pl.String).alias("module")
    )
    return (
        calls.drop_nulls("path")
        .group_by("proc", "module", "path", "step")
        .agg((pl.col("training") == "true").all().alias("_all"))
        .filter("_all")
        .drop("_all")
    )


def synchronised(trace: Trace) -> pl.DataFrame:
    """Buffers of a model in DistributedDataParallel are equal on all ranks when its forward begins to compute."""
    procs = _frames.replicated_runs(trace)
    calls = _frames.calls_of(trace, re.escape(SYNC)).join(
        procs.select("proc", "run", "rank", "lossy"), on="proc"
    )
    calls = calls.filter((pl.col("phase") == "train") & (pl.col("step") >= 0)).sort("proc", "seq")
    calls = calls.with_columns(pl.int_range(pl.len()).over("proc", "step").alias("_nth"))
    known = trace.variables.filter(pl.col("role") == "buffer").select("var", "name", "module", "kind")
    rows = _frames.rows(trace).filter((pl.col("flags") & _NO_VALUE) == 0).join(known, on="var", how="semi")
    # What was seen when a call returned belongs to that call, whatever was called within.
    at = pl.when((pl.col("edge") == 1) & (pl.col("call") > 0)).then("call").otherwise("seq")
    rows = rows.select("proc", "var", at.alias("seq"), "fp").sort("seq", maintain_order=True)
    wanted = (
        calls.select("proc", "run", "rank", "lossy", "step", "seq", "site", "_nth")
        .join(rows.select("proc", "var").unique(), on="proc")
        .sort("seq")
    )
    held = wanted.join_asof(
        rows, on="seq", by=["proc", "var"], strategy="backward", check_sortedness=False
    ).drop_nulls("fp")
    found = (
        held.sort("rank")
        .group_by("run", "var", "step", "_nth", maintain_order=True)
        .agg(
            pl.col("proc", "seq", "site").first(),
            pl.len().alias("_n"),
            pl.col("fp").n_unique().alias("_different"),
            pl.col("lossy").any().alias("_lossy"),
        )
        .filter(pl.col("_n") > 1)
    )
    same = pl.col("_different") == 1
    found = (
        found.with_columns(pl.when(same | ~pl.col("_lossy")).then(same).alias("passed"))
        .sort("step", "_nth")
        .join(known, on="var", maintain_order="left")
    )
    return _sightings.example(
        _sightings.thin(found, ["run", "var"]),
        mode="synchronised",
        what=pl.concat_str("module", pl.lit("."), "kind"),
        _variable=pl.col("name"),
        _function="torch.nn.parallel.DistributedDataParallel.forward",
        _expected="one value on all ranks when the forward begins",
        _seen=pl.format("{} different values on {} ranks", "_different", "_n"),
    )
