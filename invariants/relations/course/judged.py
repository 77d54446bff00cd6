"""What losses are given, and what layers compute with (`relations/course`)."""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import examples, fine
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.losses import LOSSES
from proctor.invariants.schema import MODEL_CALL, StateFlag, Value
from proctor.invariants.trace import Trace

CROSS_ENTROPY: Final = "torch.nn.functional.cross_entropy"
SCORED: Final = {CROSS_ENTROPY: "probabilities", "torch.nn.functional.nll_loss": "scores"}  # and what it is not to be given
_FLAT: Final = int(StateFlag.CONSTANT | StateFlag.ZERO | StateFlag.UNHASHED)
_HALVES: Final = ("bfloat16", "float16")
_TELLING: Final = 24  # numbers that show it, of one function
_HALF_TYPES: Final = re.compile(r"bfloat16|float16|float8\w*|q?u?int8|complex32")


def aligned(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step whose targets are those that came with the samples, in another order, where the model is given the samples as they came."""
    targets = _sightings.sightings(trace, Value.JUDGED).filter((pl.col("text") == "target") & (pl.col("step") >= 0) & ((pl.col("flags") & _FLAT) == 0))
    handed = _sightings.sightings(trace, Value.HANDED).filter((pl.col("flags") & _FLAT) == 0)
    if not targets.height or not handed.height:
        return fine(trace, "aligned", CROSS_ENTROPY)
    source = pl.col("text").str.split(" ").list.first().alias("_by")
    handed = handed.select("proc", "step", pl.col("seq").alias("_at"), source, pl.col("text").alias("_tensor"), "item", "fp", "number")
    rows = targets.select("proc", "step", "seq", "item", "fp", "number").with_row_index("_row").join(
        handed, on="proc", how="inner", suffix="_came"
    ).filter((pl.col("_at") < pl.col("seq")) & (pl.col("step_came") >= pl.col("step") - 1))  # fmt: skip
    here = pl.col("fp") == pl.col("fp_came")
    permuted = (pl.col("item_came") == pl.col("item")) & (pl.col("number") == pl.col("number_came")) & ~here
    rows = rows.with_columns(here.alias("_here"), permuted.alias("_permuted"))
    if not rows["_permuted"].any():
        return fine(trace, "aligned", CROSS_ENTROPY)
    # The tensors that came beside it, and whether the model was given one of them as it is.
    given = handed.filter(pl.col("_by") == "model").select("proc", "step", "_at", "fp").unique()
    beside = handed.filter(pl.col("item") < 2).select("proc", "_at", "_by", pl.col("_tensor").alias("_other"), "fp", "step")
    known = beside.join(given.rename({"_at": "_used"}), on=["proc", "fp"], how="inner", suffix="_used")
    known = known.filter((pl.col("_used") >= pl.col("_at")) & (pl.col("step_used") <= pl.col("step") + 1)).select("proc", "_at", "_other").unique()
    guilty = rows.filter("_permuted").join(known, on=["proc", "_at"], how="inner").filter(pl.col("_other") != pl.col("_tensor"))
    # Some mix samples, and judge by both orders; a target may also be another tensor that came, in its order.
    right = rows.filter("_here")
    guilty = guilty.join(right.select("proc", "_at", "_tensor").unique(), on=["proc", "_at", "_tensor"], how="anti")
    bad = guilty.join(right.select("_row").unique(), on="_row", how="anti").sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    bad = _sightings.sites(trace, bad.select("proc", "step", "seq", "_by"))
    bad = bad.select("proc", "step", "seq", "site", pl.format("the targets of the loss are those that the {} was given, in another order than the samples", pl.col("_by").replace({"loader": "loop"})).alias("_seen"), pl.lit("target").alias("_variable"), "function")
    return examples(trace, "aligned", bad.drop("function"), function=CROSS_ENTROPY).with_columns(named(bad))


def named(bad: pl.DataFrame) -> pl.Expr:
    """The function of each failing row (seq, function)."""
    by_seq = dict(bad.select("seq", "function").iter_rows())
    return pl.when(~pl.col("passed")).then(pl.col("seq").replace_strict(by_seq, default=None, return_dtype=pl.String)).otherwise(pl.col("_function")).alias("_function")


def scored(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step in which a loss that normalises scores is given probabilities, or one that wants log-probabilities is given scores."""
    scores = _sightings.sightings(trace, Value.JUDGED).filter((pl.col("text") == "scores") & (pl.col("step") >= 0))
    if not scores.height:
        return fine(trace, "scored", CROSS_ENTROPY)
    seen = _sightings.sites(trace, scores)
    seen = seen.join(_frames.metas(trace, "scores"), on="meta", how="left", maintain_order="left")
    bad = seen.filter(pl.col("scores") == pl.col("function").replace_strict(SCORED, default=None, return_dtype=pl.String))
    bad = bad.unique(["proc", "step"], keep="first", maintain_order=True)
    told = bad.select("proc", "step", "seq", "site", pl.format("{} is given {}", pl.col("function").str.split(".").list.last(), pl.col("scores").replace({"scores": "scores that are no log-probabilities"})).alias("_seen"), pl.lit("input").alias("_variable"))
    return examples(trace, "scored", told, function=CROSS_ENTROPY).with_columns(named(bad))


def digits(trace: Trace) -> pl.DataFrame:
    """One row an update, and each function that is given, or gives, float32 that went through a half type, in a process that nowhere computes in one on purpose."""
    said = pl.when(pl.col("text") == "given").then(pl.lit("is given")).otherwise(pl.lit("gives"))
    return _told(trace, "digits", _lost(trace).filter("_lost"), said)


def rounds(trace: Trace) -> pl.DataFrame:
    """One row an update, and each layer that is given the digits of float32, and gives float32 with those of a half type, in a process that nowhere computes in one on purpose."""
    rows = _lost(trace)
    whole = rows.filter((pl.col("text") == "given") & (pl.col("_whole") >= _TELLING))
    bad = rows.filter(pl.col("_lost") & (pl.col("text") != "given")).join(whole, on=["proc", "function", "site"], how="semi", maintain_order="left")
    return _told(trace, "rounds", bad, pl.lit("is given the digits of float32 and gives"))


def _lost(trace: Trace) -> pl.DataFrame:
    """Places where functions are given or give float32: proc, function, site, text, whether digits are lost (`_lost`) and where first, and how many numbers have all (`_whole`)."""
    return _frames.memo(trace, "lost digits", _find_lost)


def _find_lost(trace: Trace) -> pl.DataFrame:
    seen = _sightings.sites(trace, _sightings.sightings(trace, Value.DIGITS).filter(pl.col("step") >= 0))
    seen = seen.join(_frames.metas(trace, "digits"), on="meta", how="left", maintain_order="left")
    seen = seen.filter(~pl.col("proc").is_in(_halves(trace).implode()))
    half = pl.col("digits").is_in(_HALVES)
    rows = seen.group_by("proc", "function", "site", "text", maintain_order=True).agg(
        (half | (pl.col("number") == 0)).all().alias("_all"), (pl.col("number") * half).sum().alias("_n"), (pl.col("number") * half).max().alias("_most"),
        (pl.col("number") * ~half).sum().alias("_whole"), pl.col("step", "seq").filter(half).first(), pl.col("digits").filter(half).first(),
    )  # fmt: skip
    return rows.with_columns((((pl.col("_all") & (pl.col("_n") >= _TELLING)) | (pl.col("_most") >= _TELLING)) & pl.col("seq").is_not_null()).alias("_lost"))


def _told(trace: Trace, mode: str, rows: pl.DataFrame, said: pl.Expr) -> pl.DataFrame:
    if not rows.height:
        return fine(trace, mode, "torch.nn.functional.linear")
    bad = rows.sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    told = bad.select("proc", "step", "seq", "site", pl.format("{} {} float32 with no more digits than {} has", "function", said, "digits").alias("_seen"), pl.col("digits").alias("_variable"))
    return examples(trace, mode, told, function="torch.nn.functional.linear").with_columns(named(bad))


def _halves(trace: Trace) -> pl.Series:
    """Processes that compute in a half type on purpose: under autocast, or with parameters and buffers of one."""
    cast = trace.contexts.filter((pl.col("autocast") != "") | (pl.col("outer") != "")).select("ctx")
    under = trace.calls.join(cast, on="ctx", how="semi")["proc"].unique()
    kinds = _frames.metas(trace, "dtype")
    half = kinds.filter(pl.col("dtype").is_in([d for d in kinds["dtype"].drop_nulls().to_list() if _HALF_TYPES.fullmatch(d)]))
    held = trace.states.join(half.select("meta"), on="meta", how="semi")["proc"].unique()
    return pl.concat([under, held]).unique()


NEEDS: Final = {
    "aligned": (frozenset({MODEL_CALL, "torch.utils.data.DataLoader.__next__", *LOSSES}), frozenset({"handed", "judged"})),
    "scored": (frozenset(SCORED), frozenset({"judged"})),
    **dict.fromkeys(("digits", "rounds"), (frozenset({"torch.nn.functional.linear", "torch.nn.functional.relu", "torch.nn.functional.gelu", "torch.relu", "torch.tanh", "torch.sigmoid", "torch.conv2d", "torch.nn.functional.layer_norm", "torch.nn.functional.dropout", "torch.nn.functional.log_softmax", *LOSSES}), frozenset({"digits"}))),
}
