"""Batches that must differ: from those before them, and on ranks that hold the same model (`relations/fresh.py`).

`fresh/__init__.py` calls it, and `course` and the habits `resumed` and `paced` look up its batches. In: fingerprints of what loaders gave. Out: frames with a row a
batch, or a pass over the data, and for `fresh` examples in the form of `sightings.EXAMPLE`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace

ITER: Final = "torch.utils.data.DataLoader.__iter__"
NEXT: Final = "torch.utils.data.DataLoader.__next__"
DRAWS: Final = ("torch.randperm", "torch.randint", "torch.multinomial")  # by which torch's samplers draw an order
LOOP: Final = frozenset({ITER, NEXT, *_frames.BACKWARDS})  # calls that tell which passes are trained on
_BACK: Final = 8  # batches that each is compared with; as many workers may yield the same in turn
ENOUGH: Final = 64  # numbers in a batch that do not come again by chance
_CONSTANT: Final = int(StateFlag.CONSTANT | StateFlag.ZERO)


def batches(trace: Trace) -> pl.DataFrame:
    """Training forwards and the content of all that they were given: proc, seq, step, session, fp, flat, numbers."""
    return _frames.memo(trace, "batches", _batches)


def _batches(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sightings(trace, Value.BATCH)
    readable = (pl.col("flags") & int(StateFlag.UNHASHED)) == 0
    rows = rows.filter(readable.all().over("proc", "seq") & ~pl.col("recompute")).join(_sizes(trace), on="meta", how="left", maintain_order="left")
    return rows.group_by("proc", "seq", maintain_order=True).agg(
        pl.col("step", "session").first(),
        pl.struct("text", "fp", "meta").hash(0).sum().alias("fp"),
        ((pl.col("flags") & _CONSTANT) != 0).all().alias("flat"),
        pl.col("numbers").sum(),
    )


def _sizes(trace: Trace) -> pl.DataFrame:
    """How many numbers a tensor of each meta has: meta, numbers."""
    told = _frames.metas(trace, "shape")
    return told.select("meta", pl.Series("numbers", [math.prod(json.loads(shape)) if shape else 1 for shape in told["shape"].to_list()], dtype=pl.Int64))


def drawn(trace: Trace) -> pl.DataFrame:
    """Batches of passes that began with the draw of an order: proc, seq, _given (seq), _pass (seq of the beginning)."""
    begun = _frames.calls_of(trace, re.escape(ITER)).select("proc", "seq", pl.col("seq").alias("_pass"))
    draws = _frames.calls_of(trace, *map(re.escape, DRAWS))
    passes = _before(draws, begun, "proc").drop_nulls("_pass").select("proc", "_pass").unique()
    given = _before(_frames.calls_of(trace, re.escape(NEXT)), begun, "proc").join(passes, on=["proc", "_pass"], how="semi", maintain_order="left")
    return given.select("proc", "seq", pl.col("seq").alias("_given"), "_pass").sort("proc", "seq")


def consecutive(trace: Trace) -> pl.DataFrame:
    """A batch that a loader gave differs from those that it gave just before in the same epoch."""
    loaded = _frames.calls_of(trace, re.escape(NEXT)).select("proc", pl.col("seq").alias("_next"))
    begun = _frames.calls_of(trace, re.escape(ITER)).select("proc", pl.col("seq").alias("_epoch"))
    rows = batches(trace).sort("seq")
    for calls, key in ((loaded, "_next"), (begun, "_epoch")):
        rows = rows.join_asof(
            calls.sort(key),
            left_on="seq",
            right_on=key,
            by="proc",
            strategy="backward",
            check_sortedness=False,
            coalesce=False,
        )
    rows = rows.sort("proc", "seq").filter(pl.col("_next").is_not_null() & pl.col("_epoch").is_not_null())
    rows = whole(trace, rows).filter(~pl.col("flat"))
    group = ["proc", "session", "_epoch"]
    same = [again(k).over(group).fill_null(value=False) for k in range(1, _BACK + 1)]
    rows = rows.with_columns(
        (~pl.any_horizontal(same)).alias("passed"), pl.int_range(pl.len()).over(group).alias("_nth")
    )
    rows = _sightings.thin(rows.filter(pl.col("_nth") > 0), ["proc", "session"])
    return _sightings.example(
        _sightings.sites(trace, rows),
        mode="batch",
        what="loader",
        _function=NEXT,
        _expected=pl.lit(f"a batch unlike the last {_BACK}"),
        _seen=pl.lit("all of an earlier batch again, tensor by tensor"),
    )


def every_forward() -> pl.Expr:
    """Of rows of `batches` that belong together: what all these forwards were given, in any order and however often."""
    return pl.col("fp").unique().hash(0).sum()


def whole(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `batches` with `_next`, the call that gave a batch, one row a batch: with _all (all training forwards that were given something of it) and
    _came (what the loader gave, null where no row tells).

    One batch may be given to several models, or to one in parts, as pictures that are compared and those that they are compared with: the first call stands for it.
    """
    came = _sightings.sightings(trace, Value.HANDED).filter(pl.col("text").str.starts_with("loader"))
    came = came.group_by("proc", pl.col("seq").alias("_next"), maintain_order=True).agg(pl.struct("text", "item", "fp", "meta").hash(0).sum().alias("_came"))
    rows = rows.with_columns(every_forward().over("proc", "_next").alias("_all"))
    rows = rows.unique(["proc", "_next"], keep="first", maintain_order=True)
    return rows.join(came, on=["proc", "_next"], how="left", maintain_order="left")


def again(back: int) -> pl.Expr:
    """Of rows of `whole`: whether a batch is the one that came so many before it."""
    first, every, came = (pl.col(c) == pl.col(c).shift(back) for c in ("fp", "_all", "_came"))
    return first & came.fill_null(every)


def other_batches(trace: Trace) -> pl.DataFrame:
    """One row a step and the one before it in the same pass over a loader: passed if it trains on another batch, whoever made it."""
    begun = _frames.calls_of(trace, re.escape(ITER)).select("proc", "seq", pl.col("seq").alias("_pass"))
    rows = batches(trace).filter(~pl.col("flat") & (pl.col("step") >= 0)).sort("proc", "seq")
    rows = rows.with_columns(every_forward().over("proc", "step").alias("_all"))
    rows = rows.unique(["proc", "step"], keep="first", maintain_order=True)
    rows = rows.sort("seq").join_asof(begun.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False).sort("proc", "seq")
    rows = rows.drop_nulls("_pass")  # without a loader an agent may begin each episode alike
    same = [pl.col(c) == pl.col(c).shift(1).over("proc") for c in ("session", "_pass")]
    rows = rows.with_columns((pl.col("_all") != pl.col("_all").shift(1).over("proc")).alias("passed"), (pl.col("step") == pl.col("step").shift(1).over("proc") + 1).alias("_next"), pl.all_horizontal(same).alias("_same"))
    rows = _habits.with_family(trace, rows.filter(pl.col("_next") & pl.col("_same")))
    return _sightings.example(
        _sightings.sites(trace, _sightings.thin(rows, ["proc", "session"])), mode="another", what="batch", _function=NEXT,
        _expected=pl.lit("a batch unlike that of the step before"), _seen=pl.lit("the batch of the step before again, tensor by tensor"),
    )  # fmt: skip


def trained_passes(trace: Trace) -> pl.DataFrame:
    """Passes of loops over a loader whose batches are trained on: proc, site, _pass (seq of the beginning), step, _trained (its first backward).

    A batch belongs to the pass that began at its own line, which a loop does and `next(iterator)` does not: of that, nothing is said.
    """
    rows = _trained_batches(trace)
    return rows.group_by("proc", "site", "_pass").agg(pl.col("step", "_trained").min()).drop_nulls("_trained").sort("proc", "_pass")


def _trained_batches(trace: Trace) -> pl.DataFrame:
    """Batches of passes: proc, seq, step, site, _pass, _nth, and _trained, the first backward after it and before the next batch of any."""
    return _frames.memo(trace, "batches of passes", _find_trained)


def _find_trained(trace: Trace) -> pl.DataFrame:
    begun = _frames.calls_of(trace, re.escape(ITER)).select("proc", "site", "seq", pl.col("seq").alias("_pass"))
    every = _frames.calls_of(trace, re.escape(NEXT))
    given = _before(every, begun, "proc", "site").drop_nulls("_pass").sort("proc", "seq")
    given = given.with_columns(pl.int_range(pl.len()).over("proc", "_pass").alias("_nth"))
    trained = _before(_frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)), every.select("proc", "seq", pl.col("seq").alias("_batch")), "proc")
    ends = trained.group_by("proc", pl.col("_batch").alias("seq")).agg(pl.col("seq").min().alias("_trained"))
    return given.join(ends, on=["proc", "seq"], how="left", maintain_order="left")


def orders(trace: Trace) -> pl.DataFrame:
    """One row a batch of a loop over a loader that is trained on: passed if an order of samples was drawn when its pass began.

    Torch's samplers draw it by one of a few functions before the first batch is there, whether or not workers load.
    """
    begun = _frames.calls_of(trace, re.escape(ITER)).select("proc", "seq", pl.col("seq").alias("_pass"))
    draws = _before(_frames.calls_of(trace, *map(re.escape, DRAWS)), begun, "proc").join(trace.calls.select("proc", "seq", "t"), on=["proc", "seq"], how="left")
    drawn = draws.group_by("proc", "_pass").agg(pl.col("t").min().alias("_drawn"))
    every = _trained_batches(trace)
    # What is drawn when the first batch is there, for the step or the next batch, is none of the sampler's.
    first = every.filter(pl.col("_nth") == 0).select("proc", "_pass", "seq").join(trace.calls.select("proc", "seq", (pl.col("t") + pl.col("dur")).alias("_there")), on=["proc", "seq"], how="left")
    rows = every.drop_nulls("_trained")
    for more in (drawn, first.drop("seq")):
        rows = rows.join(more, on=["proc", "_pass"], how="left", maintain_order="left")
    drew = (pl.col("_drawn") < pl.col("_there")).fill_null(value=False)
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    rows = _habits.with_family(trace, rows.with_columns(pl.when(drew | ~lossy).then(drew).alias("passed")))
    return _sightings.example(
        _sightings.thin(rows, ["proc", "_pass"]), mode="order", what="loader", _function=pl.lit(ITER),
        _expected=pl.lit("an order of the samples is drawn when a pass begins"), _seen=pl.lit("the pass began without a draw: its samples come as they lie"),
    )  # fmt: skip


def _before(calls: pl.DataFrame, others: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Calls with the columns of the last of the others before each: proc, seq, step, site, and those."""
    left = calls.select("proc", "seq", "step", "site").sort("seq")
    right = others.drop([c for c in ("site",) if c not in by], strict=False).sort("seq")
    return left.join_asof(right, on="seq", by=list(by), strategy="backward", check_sortedness=False)


def ranks(trace: Trace) -> pl.DataFrame:
    """Ranks whose models are equal are given different batches; one row a training forward of a group of such ranks."""
    procs = _frames.replicated_runs(trace).filter(~pl.col("p2p"))
    groups = _replicas(trace).join(procs.select("proc", "run", "rank", "world"), on="proc")
    rows = (
        batches(trace)
        .filter(~pl.col("flat"))
        .join(groups, on="proc")
        .join(_frames.whole_steps(trace), on=["proc", "step"], how="semi")
    )
    rows = rows.with_columns(pl.int_range(pl.len()).over("proc", "step").alias("_nth"))
    at = ["run", "clone", "sharding", "step", "_nth"]
    found = (
        rows.sort("rank")
        .group_by(at, maintain_order=True)
        .agg(
            pl.col("proc", "seq", "world").first(),
            pl.len().alias("_n"),
            pl.col("fp").n_unique().alias("_different"),
            pl.col("rank").alias("_who"),
            pl.col("fp").alias("_fps"),
            pl.col("rank").cast(pl.String).str.join(", ").alias("_ranks"),
        )
    )
    # Ranks of a group may make another number of forwards in a step: compared where all have one.
    size = groups.group_by("run", "clone").agg(pl.len().alias("_size"))
    found = found.join(size, on=["run", "clone"]).filter(
        (pl.col("_n") == pl.col("_size")) & (pl.col("_n") > 1)
    )
    found = found.with_columns((pl.col("_different") == pl.col("_n")).alias("passed")).sort("step", "_nth")
    # Without a loader the same data on all ranks may be meant, as in a comparison with one process.
    loaders = _frames.calls_of(trace, re.escape(NEXT))["proc"].unique()
    loads = pl.col("proc").is_in(loaders.implode())
    found = found.join(trace.families, on="proc", how="left", maintain_order="left").with_columns(
        pl.when(loads).then(pl.lit(None, dtype=pl.String)).otherwise("family").alias("family"),
        pl.concat_str("sharding", pl.when(loads).then(pl.lit(", with a loader")).otherwise(pl.lit(""))).alias(
            "what"
        ),
    )
    found = _sightings.thin(found, ["run", "clone"])
    alike = [_alike(*pair) for pair in found.select("_who", "_fps").iter_rows()]
    return _sightings.example(
        _sightings.sites(trace, found.with_columns(pl.Series("_sides", alike, dtype=pl.List(pl.List(pl.Int32))))),
        mode="ranks",
        _function=pl.lit("torch.utils.data.DistributedSampler"),
        _expected=pl.format("different batches on ranks {}", "_ranks"),
        _seen=pl.format("{} different batches on {} ranks", "_different", "_n"),
    )


def _alike(ranks: Sequence[int], batches: Sequence[int]) -> list[list[int]]:
    """Ranks that are given one batch, each such group."""
    groups: dict[int, list[int]] = {}
    for rank, fp in zip(ranks, batches, strict=True):
        groups.setdefault(fp, []).append(rank)
    return sorted(group for group in groups.values() if len(group) > 1)


def _replicas(trace: Trace) -> pl.DataFrame:
    """Groups of ranks that train one model: proc, clone (key of the group), sharding (`ddp`, `fsdp`, `none`)."""
    first = _frames.first_values(trace).join(
        _frames.metas(trace, "wrapper", "placement", "shape"), on="meta", how="left"
    )
    owned = _frames.owned(trace).filter(pl.col("role") == "parameter").select("var", "model", "name")
    first = first.join(owned, on="var")
    flat = (pl.col("flags") & _CONSTANT) != 0
    one = first.group_by("proc").agg(
        pl.struct("model", "name", "fp").hash(0).sum().alias("_values"),
        pl.struct("model", "name", "shape").hash(0).sum().alias("_shapes"),
        pl.col("wrapper").str.starts_with("fsdp").fill_null(value=False).any().alias("_fsdp"),
        pl.col("wrapper").eq("ddp").fill_null(value=False).any().alias("_ddp"),
        pl.col("placement").str.contains(",").fill_null(value=False).any().alias("_mesh"),
        pl.col("placement").is_not_null().any().alias("_placed"),
        flat.all().alias("_flat"),
    )
    # Shards of FSDP differ and are of one model nevertheless; on a mesh of two dimensions some ranks may share a batch.
    one = one.filter(~pl.col("_flat") & ~pl.col("_mesh") & (pl.col("_fsdp") | ~pl.col("_placed")))
    return one.select(
        "proc",
        pl.when("_fsdp").then(pl.lit(0, dtype=pl.UInt64)).otherwise("_values").alias("clone"),
        pl.when("_fsdp")
        .then(pl.lit("fsdp"))
        .when("_ddp")
        .then(pl.lit("ddp"))
        .otherwise(pl.lit("none"))
        .alias("sharding"),
    )
