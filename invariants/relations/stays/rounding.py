"""Products in place, and whole updates, that rounding takes back (`relations/stays`)."""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.contain.trained import changed_data, pushed
from proctor.invariants.relations.course.updating import examples
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace

PRODUCT: Final = "torch.Tensor.mul_"
# A number with b bits behind its first is left as it is by a factor that lies closer to 1 than 2 ** -(b + 2): half of its last digit is at least that of the number.
HALVES: Final = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
_BESIDE: Final = ("1.value", "other.value")


def product(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step that multiplies a parameter or buffer in a half type by a number so near to 1 that no element of any tensor would change."""
    calls = _frames.calls_of(trace, r"torch\.Tensor\.mul_").filter(pl.col("step") >= 0)
    found = []
    for args in calls["args"].unique().to_list():
        given = trace.features[args]
        factor = next((given[name] for name in _BESIDE if name in given), None)
        close = HALVES.get(str(given.get("0.dtype")), 0.0)
        name = given.get("0.name")  # of what a model holds: what a computation works on may be multiplied by anything
        if name and isinstance(factor, float) and 0 < abs(1 - factor) < close:
            found.append((args, f"{given['0.dtype']} times {factor!r} is what it was, whatever it holds", str(name)))
    told = pl.DataFrame(found, schema={"args": pl.UInt32, "_seen": pl.String, "_variable": pl.String}, orient="row")
    bad = calls.join(told, on="args", how="inner", maintain_order="left").sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    above = trace.calls.select("proc", pl.col("seq").alias("parent"), pl.col("fn").alias("_above"))
    inside = bad.join(above, on=["proc", "parent"], how="left", maintain_order="left")["_above"].to_list()
    where = pl.Series("_where", [f", in {trace.functions[code]}" if code is not None else "" for code in inside], dtype=pl.String)
    bad = bad.with_columns(where).with_columns(pl.concat_str("_seen", "_where").alias("_seen"))
    return examples(trace, "product", bad.select("proc", "step", "seq", "site", "_seen", "_variable"), function=PRODUCT)


def update(trace: Trace) -> pl.DataFrame:
    """One row an update, and each that leaves a parameter in a half type as it was for the second time running, though its gradient is not zero and others of its kind move."""
    rows = pushed(trace).filter(pl.col("dtype").is_in(list(HALVES)) & pl.col("optimizer").is_not_null() & (pl.col("step") >= 0))
    rows = rows.join(_frames.whole_steps(trace), on=["proc", "step"], how="semi", maintain_order="left")
    rows = rows.join(changed_data(trace), on=["proc", "var", "step"], how="left", maintain_order="left").with_columns(pl.col("changed").fill_null(value=False))
    rows = rows.sort("proc", "var", "step").unique(["proc", "var", "step"], keep="first", maintain_order=True)
    before = [pl.col(c).shift(1).over("proc", "var") for c in ("changed", "step")]
    rows = rows.with_columns((~pl.col("changed") & ~before[0] & (before[1] == pl.col("step") - 1)).fill_null(value=False).alias("_still"))
    bad = rows.filter(pl.col("_still") & pl.col("changed").any().over("proc", "step", "optimizer")).sort("proc", "step", "position", maintain_order=True)
    bad = bad.group_by("proc", "step", maintain_order=True).agg(pl.len().alias("_n"), pl.col("name", "dtype", "update", "site").first())
    seen = pl.format("{} and {} others in {} are what they were, bit by bit, after two updates with gradients: a step is less than half of the last digit", "name", pl.col("_n") - 1, "dtype")
    told = bad.select("proc", "step", pl.col("update").fill_null(0).alias("seq"), pl.col("site").fill_null(0), seen.alias("_seen"), pl.col("name").alias("_variable"))
    return examples(trace, "update", told, function=_frames.UPDATE)
