"""Parameters that are told apart wrongly: groups that give norms and biases the decay of matrices, layers that train by half (`relations/course`)."""

from __future__ import annotations

import json
from typing import Final

import polars as pl

from proctor.invariants.relations.contain.trained import held_parameters
from proctor.invariants.relations.course.updating import examples
from proctor.invariants.relations.habits.option import members
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import PROLOGUE

_DECAY: Final = "weight_decay"
_MANY: Final = 4  # groups: of an optimizer with more they part something else
_FEW: Final = 2  # parameters of a kind
_LAYERS: Final = r"^torch\.nn\.(?:.*\.)?(?:Linear|Bilinear|Conv\w+|RNN|LSTM|GRU|\w+Cell)$"
_MATRICES: Final = r"(Linear|Conv\dd|Conv1D|Bilinear|MultiheadAttention)$"


def reversed_decay(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if each norm and bias has more weight decay than each matrix."""
    seen = decays(trace)
    worse = (pl.col("_least") > pl.col("_most")).fill_null(value=False)
    bad = seen.filter(worse)
    said = pl.format("weight decay is {} for norms and biases such as {}, and {} for matrices such as {}", "_least", "_variable", "_most", "_matrix")
    return examples(trace, "reversed", bad.select("proc", "step", "seq", "site", said.alias("_seen"), "_variable"), function=_frames.UPDATE)


def parted(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if norms and biases have groups of their own, weight decay as matrices have, and nothing else of their own."""
    seen = decays(trace)
    few = (pl.col("_groups") > 1) & (pl.col("_groups") <= _MANY)
    bad = seen.filter(few & pl.col("_apart") & pl.col("_alike") & (pl.col("_least") > 0) & (pl.col("_vectors") >= _FEW) & (pl.col("_matrices") >= _FEW))
    said = pl.format("norms and biases such as {} have a group of their own, and weight decay {} as the matrices have", "_variable", "_least")
    return examples(trace, "parted", bad.select("proc", "step", "seq", "site", said.alias("_seen"), "_variable"), function=_frames.UPDATE)


def halved(trace: Trace) -> pl.DataFrame:
    """One row an update, and each early one of a model that has one layer whose weights are all frozen and whose bias trains.

    Where weights of several layers are frozen, that is a way to train (biases alone), as are fixed scales of norms. A layer with another weight that
    trains has one part fixed on purpose: the scale of a weight norm, the recurrent matrix.
    """
    held = held_parameters(trace).filter((pl.col("model") != "") & pl.col("module").str.contains(_LAYERS))
    mine = ["proc", "model"]
    held = held.with_columns(pl.col("name").str.replace(r"\.?[^.]*$", "").alias("_path"), pl.col("kind").str.starts_with("weight").alias("_weight"), pl.col("kind").str.starts_with("bias").alias("_bias"))
    trained = pl.col("_bias") & ~pl.col("frozen") & pl.col("optimizer").is_not_null()
    held = held.with_columns(trained.any().over(*mine, "_path").alias("_trains"), (pl.col("_weight") & pl.col("frozen")).alias("_rests"))
    moves = pl.col("_weight") & ~pl.col("frozen")
    few = (pl.col("_rests").sum().over(mine) == 1) & moves.any().over(mine) & ~moves.any().over(*mine, "_path")
    frozen = held.filter(pl.col("_rests") & pl.col("_trains") & few).select(*mine, pl.col("name").alias("_variable"))
    steps = _frames.updates(trace).filter((pl.col("step") >= 0) & (pl.col("step") < PROLOGUE)).select("proc", "step", "seq", "site")
    bad = frozen.join(steps.unique(["proc", "step"], keep="last", maintain_order=True), on="proc").sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} has requires_grad=False, while its bias and the weights of all other layers train", "_variable").alias("_seen"), "_variable")
    return examples(trace, "halved", bad, function=_frames.UPDATE)


def decays(trace: Trace) -> pl.DataFrame:
    """One row an early look at an optimizer whose groups all tell their weight decay: proc, step, seq, site, and what its groups hold."""
    return _frames.memo(trace, "course decays", _find_decays)


def _find_decays(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sightings(trace, Value.OPTION).join(_frames.metas(trace, "when"), on="meta", how="left", maintain_order="left")
    rows = rows.filter((pl.col("when") == "update") & (pl.col("text") != "step") & (pl.col("step") >= 0) & (pl.col("step") < PROLOGUE))
    if not rows.height or "shape" not in trace.metas.columns:
        return pl.DataFrame(schema=_SCHEMA)
    calls = _frames.updates(trace).select("proc", "seq", "site", pl.col("optimizer").alias("held")).drop_nulls("held")
    rows = rows.join(calls, on=["proc", "seq"], how="inner", maintain_order="left").with_columns(pl.col("item").cast(pl.String).alias("group"))
    look = ["proc", "seq", "step", "site", "held"]
    # Rates of a warm-up that begins at 0 are alike in its first step alone.
    rests = (pl.col("text").first() == "lr") & (pl.col("number") == 0).all()
    options = rows.group_by(*look, "text").agg(((pl.col("number").n_unique() == 1) & ~rests).alias("_one"), pl.len().alias("_of"))
    groups = rows.group_by(look).agg(pl.col("group").n_unique().alias("_groups"))
    alike = options.join(groups, on=look).group_by(look, maintain_order=True).agg(
        (pl.col("_one") & (pl.col("_of") == pl.col("_groups"))).all().alias("_alike"), pl.col("_groups").first()
    )  # fmt: skip
    decays = rows.filter(pl.col("text") == _DECAY).select(*look, "group", "number")
    shapes = trace.metas.select("meta", pl.col("shape").map_elements(_dims, return_dtype=pl.Int64).alias("_dims"))
    sizes = trace.states.select("proc", "var", "meta").unique(maintain_order=True).join(shapes, on="meta").drop_nulls("_dims").unique(["proc", "var"], keep="last", maintain_order=True)
    names = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data")).select("var", "name", "module")
    sizes = sizes.join(names, on="var").select("proc", "name", "module", "_dims").unique(["proc", "name"], keep="first", maintain_order=True)
    held = members(trace).join(sizes, on=["proc", "name"], how="inner", maintain_order="left")
    held = decays.join(held, on=["proc", "held", "group"], how="inner", maintain_order="left")
    vector, matrix = pl.col("_dims") < 2, (pl.col("_dims") > 1) & pl.col("module").str.contains(_MATRICES)
    found = held.group_by(look, maintain_order=True).agg(
        pl.col("number").filter(vector).min().alias("_least"), pl.col("number").filter(matrix).max().alias("_most"),
        pl.col("name").filter(vector).first().alias("_variable"), pl.col("name").filter(matrix).first().alias("_matrix"),
        vector.sum().alias("_vectors"), matrix.sum().alias("_matrices"),
        pl.col("group").filter(vector).unique().alias("_a"), pl.col("group").filter(matrix).unique().alias("_b"),
    )  # fmt: skip
    apart = pl.col("_a").list.set_intersection("_b").list.len() == 0
    found = found.filter((pl.col("_vectors") > 0) & (pl.col("_matrices") > 0)).with_columns(apart.alias("_apart"))
    return found.join(alike, on=look, how="inner", maintain_order="left").select(*_SCHEMA)


def _dims(shape: str | None) -> int | None:
    return len(json.loads(shape)) if shape else None


_SCHEMA: Final = {
    "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32, "_least": pl.Float64, "_most": pl.Float64, "_variable": pl.String,
    "_matrix": pl.String, "_vectors": pl.UInt32, "_matrices": pl.UInt32, "_apart": pl.Boolean, "_alike": pl.Boolean, "_groups": pl.UInt32,
}  # fmt: skip
