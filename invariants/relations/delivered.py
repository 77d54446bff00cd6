"""A collective gives what its name promises: what a rank receives is what another sent, and a sum is the sum.

`copy`: what arrives has the bits that its sender gave: broadcast, send and recv, scatter, gather, all_gather, all_to_all.
`sum`: all_reduce, reduce and reduce_scatter give the sum (or the mean) of what the ranks gave, up to rounding, by a fixed
projection. Catches a buffer that is written while the call runs, a result that is read too early, a view that is not the
tensor, memory and links that flip bits, a wrapper that compresses or drops a rank's part.

Exact, of any program: nothing is learned but that the records are there. Source: ours. That all members hold the same result
is `agree` (PR110); this says that it is the right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.views import collectives as _collectives
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import alone, unseen
from proctor.invariants.schema import Name, StateFlag, Value
from proctor.invariants.trace import Trace

_ALL: Final = -1
_CALL: Final = ["run", "group", "members", "item"]
# What a rounding to nearest is off by at most, relative. Sums of integers are exact as far as float64 goes.
_EPSILON: Final = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "int32": 2.0**-50, "int64": 2.0**-50}
_ROUNDINGS: Final = 4  # a member, of every element: on the way, in the sum, in the mean
_SUMS: Final = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_SAYS: Final = {
    "copy": "what a rank receives from a collective has the bits that its sender gave",
    "sum": "a reduction gives the sum, or the mean, of what the ranks gave",
}
_ADVICE: Final = {
    "copy": "A buffer is written or read while the call runs, or the call was given a view or a copy instead of the tensor; "
    "where the program does neither, look at the hardware of the two ranks.",
    "sum": "A buffer is written or read while the call runs, or something between the program and the backend changes what is sent "
    "(compression, a hook); where neither is so, look at the hardware of the ranks.",
}


@register
class Delivered(Relation):
    """What collectives give is what they were given."""

    name = "delivered"
    code = "PR114"
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0
    standing: ClassVar[Standing] = Standing.LAW
    reach: ClassVar[int | None] = 1
    across_ranks: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        held = _every(trace, set(_PARTS)).filter("passed")["mode"].unique().sort().to_list()
        return [Hypothesis.of(self.name, mode=mode, what="collectives") for mode in held]

    def idle(self, trace: Trace) -> bool:
        return alone(trace) or unseen(trace, Value.GOT)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        found = _sightings.bound_examples(trace, _every(trace, {h.text("mode") for h in hypotheses}), hypotheses)
        return Examples(found.frame.drop("family"), ())

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        return "records" if hypothesis["mode"] == "copy" else "numbers"

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(_collectives.FUNCTIONS, values=frozenset({"sent", "given", "got"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return _SAYS[hypothesis.text("mode")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return _sightings.detail(example, _ADVICE[hypothesis.text("mode")])


def _every(trace: Trace, modes: set[str]) -> pl.DataFrame:
    return _sightings.of_parts(trace, "delivered", {mode: _PARTS[mode] for mode in sorted(modes)})


def _pieces(trace: Trace, kind: Value) -> pl.DataFrame:
    """Rows of pieces with their call: proc, run, rank, lossy, seq, step, site, fn, group, members, size, op, item, other, dtype,
    fp, norm, flags, number."""
    return _frames.memo(trace, f"delivered {kind.name}", lambda t: _find_pieces(t, kind))


def _find_pieces(trace: Trace, kind: Value) -> pl.DataFrame:
    rows = _collectives.pieces(trace, kind)
    said = _frames.lasting(trace, Name.META, "pieces", _meta_of_pieces)
    return rows.join(said, on="meta", how="inner", maintain_order="left")


def _meta_of_pieces(trace: Trace) -> pl.DataFrame:
    found = []
    for code, text in enumerate(trace.texts.get(Name.META, [])):
        if '"peer"' not in text:
            continue
        try:
            facts = json.loads(text)
            found.append((code, int(facts["peer"]), str(facts["dtype"])))
        except (ValueError, KeyError, TypeError):
            continue
    return pl.DataFrame(found, schema={"meta": pl.UInt32, "other": pl.Int32, "dtype": pl.String}, orient="row")


def _absent(trace: Trace) -> pl.DataFrame:
    """Runs of which a rank has no records, or lost some: run."""
    lost = trace.procs.group_by("run").agg((pl.col("rank").n_unique() < pl.col("world").max()).alias("_missing"))
    lossy = {p.run for p in trace.processes if p.dropped > 0 or not p.finished}
    return lost.filter(pl.col("_missing") | pl.col("run").is_in(sorted(lossy))).select("run")


def _copies(trace: Trace) -> pl.DataFrame:
    """One row a piece that was received as it was sent, or not; unknown where what was sent is not on record."""
    got = _pieces(trace, Value.GOT).filter((pl.col("other") != _ALL) & ~pl.col("fn").is_in(_SUMS))
    got = got.filter((pl.col("flags") & int(StateFlag.UNHASHED)) == 0)
    if not got.height:  # gradients are summed in most programs, and nothing is copied
        return pl.DataFrame(schema=_sightings.EXAMPLE)
    own = _pieces(trace, Value.GIVEN).filter(pl.col("other") != _ALL)
    sent = _collectives.sent(trace)
    # What is given to all of a group, and to one peer, is in the row of what is sent.
    whole = sent.filter((pl.col("fp").is_not_null()) & ((pl.col("flags") & int(StateFlag.UNHASHED)) == 0) & pl.col("dtype").is_not_null())
    to_all = whole.filter(pl.col("fn").is_in(["broadcast", "all_gather", "all_gather_into_tensor", "gather"]))
    to_one = whole.filter(pl.col("fn").is_in(_collectives.SENDS) & (pl.col("peer") >= 0))
    way = ["run", "group", "members", "item"]
    given = pl.concat([
        to_all.select(*way, pl.col("rank").alias("_from"), pl.lit(_ALL, dtype=pl.Int32).alias("_to"), "fn", "tag", pl.col("fp").alias("_sent"), pl.col("dtype").alias("_type")),
        to_one.select(*way, pl.col("rank").alias("_from"), pl.col("peer").alias("_to"), pl.lit("p2p").alias("fn"), "tag", pl.col("fp").alias("_sent"), pl.col("dtype").alias("_type")),
        own.select(*way, pl.col("rank").alias("_from"), pl.col("other").alias("_to"), "fn", "tag", pl.col("fp").alias("_sent"), pl.col("dtype").alias("_type")),
    ])  # fmt: skip
    one_way = pl.col("fn").is_in(_collectives.RECEIVES)
    got = got.with_columns(
        pl.col("other").alias("_from"),
        pl.when(pl.col("fn").is_in(["broadcast", "all_gather", "all_gather_into_tensor", "gather"])).then(_ALL).otherwise("rank").cast(pl.Int32).alias("_to"),
        pl.when(one_way).then(pl.lit("p2p")).otherwise("fn").alias("_fn"),
    )  # fmt: skip
    both = got.join(given.rename({"fn": "_fn"}), on=[*way, "_from", "_to", "_fn", "tag"], how="left", maintain_order="left")
    missing = _absent(trace).with_columns(pl.lit(value=True).alias("_lost"))
    both = both.join(missing, on="run", how="left", maintain_order="left")
    both = both.filter(pl.col("_sent").is_not_null() | pl.col("_lost").fill_null(value=False))
    both = both.filter(pl.col("_type").is_null() | (pl.col("_type") == pl.col("dtype")))  # another dtype is `agree`'s
    both = both.with_columns((pl.col("fp") == pl.col("_sent")).alias("passed"))
    both = _sightings.thin(both.sort("run", "proc", "seq"), ["proc", "fn"])
    what = pl.concat_str(pl.lit("call "), pl.col("item") + 1, pl.lit(" of the group of ranks "), "members")
    return _sightings.example(
        both, mode="copy", what="collectives",
        _function=pl.concat_str(pl.lit("torch.distributed."), "fn"), _variable=what,
        _expected=pl.concat_str(pl.lit("rank "), "rank", pl.lit(" holds what rank "), "_from", pl.lit(" sent in "), what),
        _seen=pl.concat_str(pl.lit("other bits than rank "), "_from", pl.lit(" gave to "), "fn"),
    )  # fmt: skip


def _sums(trace: Trace) -> pl.DataFrame:
    """One row a sum that a rank holds; unknown where a member's part is not on record."""
    plain = pl.col("op").is_in(["SUM", "AVG"]) & pl.col("fn").is_in(_SUMS) & pl.col("number").is_finite() & pl.col("norm").is_finite()
    got = _pieces(trace, Value.GOT).filter(plain & (pl.col("size") > 1))
    given = _pieces(trace, Value.GIVEN).filter(plain).with_columns(pl.col("norm").cast(pl.Float64))
    to_me = pl.when(pl.col("other") == _ALL).then(pl.lit(None, dtype=pl.Int32)).otherwise("other").alias("_to")
    parts = given.with_columns(to_me).group_by(*_CALL, "fn", "dtype", "_to").agg(
        pl.col("number").sum().alias("_sum"), pl.col("norm").sum().alias("_size"), pl.col("rank").n_unique().alias("_members")
    )
    pieced = pl.col("fn").str.starts_with("reduce_scatter")
    got = got.with_columns(pl.when(pieced).then("rank").otherwise(pl.lit(None, dtype=pl.Int32)).alias("_to"))
    both = got.join(parts, on=[*_CALL, "fn", "dtype", "_to"], how="left", nulls_equal=True, maintain_order="left")
    missing = _absent(trace).with_columns(pl.lit(value=True).alias("_lost"))
    both = both.join(missing, on="run", how="left", maintain_order="left")
    whole = (pl.col("_members") == pl.col("size")).fill_null(value=False)
    both = both.filter(whole | pl.col("_lost").fill_null(value=False))
    share = pl.when(pl.col("op") == "AVG").then(pl.col("size")).otherwise(1)
    epsilon = pl.col("dtype").replace_strict(_EPSILON, default=None, return_dtype=pl.Float64)
    room = epsilon * _ROUNDINGS * pl.col("size") * (pl.col("_size") / share)
    both = both.with_columns(
        (pl.col("_sum") / share).alias("_wanted"),
        pl.when(whole).then(((pl.col("_sum") / share) - pl.col("number")).abs() <= room).alias("passed"),
    )
    both = _sightings.thin(both.sort("run", "proc", "seq"), ["proc", "fn"])
    what = pl.concat_str(pl.lit("call "), pl.col("item") + 1, pl.lit(" of the group of ranks "), "members")
    return _sightings.example(
        both, mode="sum", what="collectives",
        _function=pl.concat_str(pl.lit("torch.distributed."), "fn"), _variable=what,
        _expected=pl.concat_str(pl.lit("the ranks' tensors add up: projection "), pl.col("_wanted").round_sig_figs(8), pl.lit(" in "), what),
        _seen=pl.concat_str(pl.lit("rank "), "rank", pl.lit(" holds a tensor of projection "), pl.col("number").round_sig_figs(8)),
    )  # fmt: skip


_PARTS: Final = {"copy": _copies, "sum": _sums}
