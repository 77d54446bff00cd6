"""What was saved against what was live: when did the model hold each saved tensor? (`relations/roundtrip.py`)"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.codec.variable import unwrapped
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace

FILE: Final = "<file>"
_PATH: Final = re.compile(r"(.*)\['([^']+)'\]", re.DOTALL)
_STATE: Final = re.compile(r"(.*)\['state'\]\[[^\]]+\]", re.DOTALL)
_NO_VALUE: Final = int(StateFlag.NONE | StateFlag.UNHASHED)
_END: Final = (1 << 32) - 1


def places(trace: Trace) -> pl.DataFrame:
    """By code of a place: group (path of the mapping that holds it), key (name, or `optimizer:` and the kind of state)."""
    return _frames.memo(trace, "saved places", _places)


def _places(trace: Trace) -> pl.DataFrame:
    rows = []
    names = frozenset(trace.variables["name"])
    for code, text in enumerate(trace.places):
        found = _PATH.fullmatch(text)
        if found is None:
            continue
        state = _STATE.fullmatch(found[1])
        rows.append(
            (code, found[1], found[2] if found[2] in names else unwrapped(found[2]))
            if state is None
            else (code, state[1], f"optimizer:{found[2]}")
        )
    return pl.DataFrame(rows, schema={"place": pl.UInt32, "group": pl.String, "key": pl.String}, orient="row")


def live(trace: Trace) -> pl.DataFrame:
    """Every value that a variable held: proc, key, fp, meta, role, begin and end (seq), trained (it changed at all).

    Without variables that two modules share the name of, and shards, whose name stands for the whole elsewhere.
    """
    return _frames.memo(trace, "live values", _live)


def _live(trace: Trace) -> pl.DataFrame:
    about = trace.variables.filter(pl.col("attr") != "grad").select("var", "name", "role", "attr")
    optimizer = pl.col("role") == "optimizer"
    about = about.with_columns(
        pl.when(optimizer).then(pl.concat_str(pl.lit("optimizer:"), "attr")).otherwise("name").alias("key")
    )
    rows = (
        _frames.rows(trace)
        .filter((pl.col("flags") & _NO_VALUE) == 0)
        .join(about, on="var", maintain_order="left")
    )
    rows = rows.join(
        _frames.metas(trace, "placement", "wrapper", "dtype", "shape"),
        on="meta",
        how="left",
        maintain_order="left",
    )
    sharded = pl.col("placement").is_not_null() | pl.col("wrapper").str.starts_with("fsdp").fill_null(
        value=False
    )
    rows = rows.filter(~sharded.any().over("proc", "var"))
    at = pl.when((pl.col("edge") == 1) & (pl.col("call") > 0)).then("call").otherwise("seq").alias("begin")
    twice = (
        (pl.struct("fp").n_unique().over("proc", "var", "seq", "call", "edge") > 1).any().over("proc", "var")
    )
    rows = rows.with_columns(at).filter(~twice)
    return rows.select(
        "proc",
        "key",
        "fp",
        "role",
        "dtype",
        "shape",
        "begin",
        pl.col("begin").shift(-1).over("proc", "var").fill_null(_END).alias("end"),
        (pl.col("fp").n_unique().over("proc", "var") > 1).alias("trained"),
    )


def saved(trace: Trace) -> pl.DataFrame:
    """Tensors that were saved under the name of a live variable of the same dtype and shape, and when that held them.

    One row a tensor of a save: proc, seq, step, group, key, fp, role, trained (before the save), now (it holds it at the
    save), begin and end of the last time that it held it before the save, null where it never did.
    """
    return _frames.memo(trace, "saved against live", _saved)


def _saved(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sightings(trace, Value.SAVED).filter((pl.col("flags") & _NO_VALUE) == 0)
    rows = rows.join(places(trace), on="place", maintain_order="left").join(
        _frames.metas(trace, "dtype", "shape"), on="meta", how="left", maintain_order="left"
    )
    rows = rows.select("proc", "seq", "step", "group", "key", "fp", "dtype", "shape").with_row_index("_row")
    place = ["proc", "key", "dtype", "shape"]
    held = live(trace).sort("begin", maintain_order=True)
    # Alone in its time a value tells nothing of when it was saved.
    before = held.select(
        *place, "begin", "role", (pl.col("fp") != pl.col("fp").first().over(place)).cum_max().over(place).alias("trained")
    )
    same = held.select(*place, "fp", "begin", pl.col("end").cum_max().over(*place, "fp"))
    rows = rows.sort("seq", maintain_order=True)
    rows = rows.join_asof(before, left_on="seq", right_on="begin", by=place, coalesce=True, check_sortedness=False)
    rows = rows.drop("begin", strict=False).drop_nulls("role")
    rows = rows.join_asof(same, left_on="seq", right_on="begin", by=[*place, "fp"], coalesce=False, check_sortedness=False)
    return (
        rows.sort("_row")
        .with_columns((pl.col("end") > pl.col("seq")).fill_null(value=False).alias("now"))
        .select("proc", "seq", "step", "group", "key", "fp", "role", "trained", "now", "begin", "end")
    )


def moments(trace: Trace) -> pl.DataFrame:
    """`saved` of states that are the model's: passed if the tensor was live when the rest of its group was.

    A tensor fails that never was live, or only before the rest. Groups of which most trained parameters were never live are
    another model (an average, a merged copy), and are left out, as is what lies beside the model's own state in one save.
    `passed` and `now` are null where steps without records may hide the value.
    """
    return _frames.memo(trace, "saved moments", _moments)


def _most(which: pl.Expr, met: pl.Expr, at: list[str]) -> pl.Expr:
    """More than half of these tensors of a group were live at some time."""
    return (which & met).sum().over(at) * 2 > which.sum().over(at)


def _not_beside_the_model(rows: pl.DataFrame, at: list[str]) -> pl.DataFrame:
    """Without groups that hold other values of names which another group of the same save holds as they are now."""
    whole = rows.with_columns(pl.col("now").all().over(at).alias("_whole"))
    model = whole.filter("_whole").select("proc", "seq", "key", pl.lit(value=True).alias("_held")).unique()
    beside = (pl.col("_held").any().over(at) & ~pl.col("_whole")).fill_null(value=False)
    return whole.join(model, on=["proc", "seq", "key"], how="left", maintain_order="left").filter(~beside).drop("_whole", "_held")


def _moments(trace: Trace) -> pl.DataFrame:
    rows = saved(trace)
    at = ["proc", "seq", "group"]
    met, parameter = pl.col("begin").is_not_null(), pl.col("role") != "buffer"
    trained = parameter & pl.col("trained")
    # Of an average, norms and biases that did not move yet may be the model's; so most have to be.
    known = pl.when(trained.any().over(at)).then(_most(trained, met, at)).otherwise(_most(parameter, met, at))
    rows = _not_beside_the_model(rows, at).filter(known).join(_gaps(trace), on="proc", how="left", maintain_order="left")
    certain = pl.col("_gap").fill_null(_END) > pl.col("step")
    together = (met & (pl.col("end") > pl.col("begin").max().over(at))).fill_null(value=False)
    # An average that was just begun is a copy of the parameters, and keeps the buffers that it was made with.
    begun = ~parameter & ~pl.col("now").any().over(at)
    return rows.with_columns(
        pl.when(together | (certain & ~begun)).then(together).alias("passed"),
        pl.when(pl.col("now") | certain).then("now").alias("now"),
        met.alias("_met"),
    )


def _gaps(trace: Trace) -> pl.DataFrame:
    """The first step of each process that was not recorded while a later one was: proc, _gap."""
    steps = _frames.seen_steps(trace).filter(pl.col("step") >= 0).sort("proc", "step")
    missing = steps.with_columns(pl.int_range(pl.len()).over("proc").alias("_nth")).filter(
        pl.col("step") != pl.col("_nth")
    )
    return missing.group_by("proc").agg(pl.col("_nth").min().alias("_gap"))
