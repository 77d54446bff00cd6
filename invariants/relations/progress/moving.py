"""Which parameters train: those that move in the first updates of their model (`relations/progress.py`).

A parameter is known by its name without the numbers of layers, so that another depth changes nothing.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import PROLOGUE

_UPDATES: Final = 2  # of the model, after which it is looked; a parameter behind one that begins at zero moves in the second
_EXCEPTIONS: Final = 24  # a program of which more than these rest is one of which nothing is said


def moved(trace: Trace) -> pl.DataFrame:
    """One row a parameter whose model was updated twice in the first steps, which every window holds: passed if it has moved by then. The columns of `progress`, and `what`."""
    return _frames.memo(trace, "parameters that move", _moved)


def _moved(trace: Trace) -> pl.DataFrame:
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    about = about.select("var", "name", "model", "module", "kind", "position", pl.col("name").str.replace_all(r"\.\d+(?:\.|$)", ".#.").alias("what"))
    rows = _frames.data_by_step(trace).join(about, on="var", how="inner", maintain_order="left")
    whole = _frames.whole_steps(trace).filter(pl.col("step") >= 0)
    # A program without an optimizer moves its parameters in steps of its own.
    updates = _frames.updates(trace).select("proc", "step").unique()
    steps = rows.filter(pl.col("changed") & (pl.col("step") >= 0)).join(updates.select("proc").unique(), on="proc", how="anti")
    changes = pl.concat([rows.filter("changed").join(updates, on=["proc", "step"], how="semi"), steps])
    steps = changes.join(whole, on=["proc", "step"], how="semi").select("proc", "model", "step").unique().sort("proc", "model", "step")
    second = steps.group_by("proc", "model").agg(pl.col("step").slice(_UPDATES - 1, 1).first().alias("_at")).filter(pl.col("_at") < PROLOGUE)
    mine = rows.sort("step", maintain_order=True).group_by("proc", "var", maintain_order=True).agg(
        pl.col("name", "model", "module", "kind", "position", "what", "norm", "meta").first(),
        pl.col("step").filter(pl.col("changed") & (pl.col("step") >= 0)).min().alias("_first"),
    ).join(second, on=["proc", "model"], how="inner", maintain_order="left")  # fmt: skip
    return _examples(trace, mine, (pl.col("_first") <= pl.col("_at")).fill_null(value=False))


def _examples(trace: Trace, mine: pl.DataFrame, moves: pl.Expr) -> pl.DataFrame:
    """Rows of parameters, judged at the end of step `_at`; where records are lost, only what moved is known."""
    known = ~pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    last = _frames.updates(trace).group_by("proc", "step").agg(pl.col("seq", "site", "phase").last())
    mine = mine.join(_frames.metas(trace, "wrapper"), on="meta", how="left", maintain_order="left")
    mine = mine.join(last, left_on=["proc", "_at"], right_on=["proc", "step"], how="left", maintain_order="left")
    return _habits.with_family(trace, mine).select(
        "what", "proc", "family", "name", "module", "kind", "position", "wrapper", "phase", "site", pl.col("seq").fill_null(0),
        pl.col("_at").alias("step"), pl.col("norm").alias("_a"), pl.col("norm").alias("_b"), "var", pl.when(moves | known).then(moves).alias("passed"),
    )  # fmt: skip


def exceptions(trace: Trace) -> list[tuple[str, str]]:
    """Of each process some of whose parameters move: its family, and the names of those that do not, with spaces between."""
    found = moved(trace).drop_nulls(["family", "passed"]).group_by("proc", "family", maintain_order=True).agg(
        pl.col("passed").any().alias("_some"), pl.col("what").filter(~pl.col("passed")).unique().sort().alias("_but")
    )  # fmt: skip
    found = found.filter(pl.col("_some") & (pl.col("_but").list.len() <= _EXCEPTIONS))
    return sorted({(family, " ".join(but)) for family, but in found.select("family", "_but").iter_rows()})


def models(trace: Trace) -> pl.DataFrame:
    """One row a parameter, in a process whose first three steps updated something: passed if its model has moved by then. The columns of `moved`; `what` is the class of the model."""
    return _frames.memo(trace, "models that move", _models)


def _models(trace: Trace) -> pl.DataFrame:
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data") & (pl.col("model") != ""))
    about = about.select("var", "name", "model", "module", "kind", "position", pl.col("model").str.replace(r"#\d+$", "").alias("what"))
    rows = _frames.data_by_step(trace).join(about, on="var", how="inner", maintain_order="left")
    steps = _frames.updates(trace).filter((pl.col("step") >= 0) & (pl.col("step") < PROLOGUE)).join(_frames.whole_steps(trace), on=["proc", "step"], how="semi")
    begun = steps.group_by("proc").agg(pl.col("step").n_unique().alias("_n"), pl.col("step").max().alias("_at")).filter(pl.col("_n") == PROLOGUE)
    moves = (pl.col("changed") & (pl.col("step") >= 0) & (pl.col("step") < PROLOGUE)).any().over("proc", "what")
    rows = rows.sort("step", maintain_order=True).with_columns(moves.alias("moves"), pl.col("step").min().over("proc", "what").alias("_seen"))
    mine = rows.filter(pl.col("_seen") < 1).unique(["proc", "var"], keep="first", maintain_order=True)
    mine = mine.select("proc", "var", "name", "module", "kind", "position", "what", "norm", "meta", "moves").join(begun, on="proc", how="inner", maintain_order="left")
    return _examples(trace, mine, pl.col("moves"))


def learning(trace: Trace) -> list[tuple[str, str]]:
    """Classes of models that have moved in all processes that hold them, with the family; of an only model nothing is said here."""
    found = models(trace).drop_nulls(["family", "passed"]).filter(pl.col("what").n_unique().over("proc") > 1)
    found = found.group_by("family", "what").agg(pl.col("passed").all())
    return sorted(found.filter("passed").select("family", "what").iter_rows())
