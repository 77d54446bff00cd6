"""Randomness that must not repeat: generator states, seeds, draws (`relations/fresh.py` says which).

`fresh/__init__.py` calls each of these once a trace. In: records of generator states (`values`) and of calls that draw. Out: examples in the form of
`sightings.EXAMPLE`, one row a thing that must differ from another; `passed` is null where a record may be missing.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import CallFlag, StateFlag, Value
from proctor.invariants.trace import Trace

_SEEDS_TORCH: Final = "torch.manual_seed"
_PUT_BACK: Final = "torch.set_rng_state"
SEEDS: Final = (_SEEDS_TORCH, "numpy.random.seed", "random.seed")
_FLAT: Final = int(StateFlag.CONSTANT | StateFlag.ZERO | StateFlag.UNHASHED | StateFlag.NONE)
_MIN_INTEGERS: Final = 64  # elements of a draw of integers or booleans, so that equal draws are no chance


def forwards(trace: Trace) -> pl.DataFrame:
    """The state in which a forward that draws begins was not seen before."""
    rows = _sightings.sightings(trace, Value.RNG).filter(~pl.col("recompute"))
    end = pl.col("text").str.starts_with("forward end ")
    rows = rows.with_columns(
        pl.col("text").str.extract("^forward (?:end )?(.*)$").alias("generator")
    ).drop_nulls("generator")
    drew = (
        rows.filter(end)
        .select("proc", "seq", "generator")
        .unique()
        .with_columns(pl.lit(value=True).alias("_drew"))
    )
    rows = rows.filter(~end).join(drew, on=["proc", "seq", "generator"], how="left", maintain_order="left")
    group = ["proc", "session", "generator"]
    rows = _sightings.new_ones(rows, group).with_columns(
        (pl.col("fp") == pl.col("fp").shift(1)).over(group).alias("_still"),
        (pl.col("_drew").fill_null(value=False) | (pl.col("fp") != pl.col("fp").shift(-1)).over(group).fill_null(value=False))
        .cast(pl.UInt32)
        .alias("_moved"),
    )
    # What began in this state before counts if it may have drawn from it: a loss that is a module does not.
    earlier = pl.col("_moved").cum_sum().over(*group, "fp") - pl.col("_moved")
    first = pl.col("step").filter(pl.col("_moved") == 1).first().over(*group, "fp")
    rows = rows.with_columns((earlier == 0).alias("passed"), first.alias("_before"))
    # In the state of the forward before: a repetition only if this forward draws.
    rows = rows.filter((pl.col("_nth") > 0) & (~pl.col("_still") | pl.col("_drew").fill_null(value=False)))
    rows = _sightings.sites(trace, _sightings.thin(rows, group))
    return _sightings.example(
        rows,
        mode="forward",
        what="dropout",
        _variable=pl.col("generator"),
        _function="torch.manual_seed",
        _expected="a state that no forward began in",
        _seen=_again(
            "the generator that dropout draws from is in the state in which the forward of step {} began"
        ),
    )


def steps(trace: Trace) -> pl.DataFrame:
    """A generator that moved in a step is in a state in which no step ended before."""
    rows = _sightings.sightings(trace, Value.RNG).filter(pl.col("text").str.starts_with("step "))
    group = ["proc", "session", "text"]
    rows = _sightings.new_ones(rows, group).with_columns(
        (pl.col("fp") != pl.col("fp").shift(1)).over(group).alias("_moved")
    )
    rows = _sightings.thin(rows.filter(pl.col("_moved") & (pl.col("_nth") > 0)), group)
    return _sightings.example(
        rows,
        mode="step",
        what=pl.col("text").str.strip_prefix("step "),
        _expected="a state in which no step ended before",
        _function=_seeder("step "),
        _seen=_again("the state in which step {} ended"),
    )


def loads(trace: Trace) -> pl.DataFrame:
    """A generator that the loading of a batch draws from is in a state from which no batch was drawn before."""
    rows = _sightings.sightings(trace, Value.RNG).filter(pl.col("text").str.starts_with("load "))
    group = ["proc", "session", "text"]
    rows = _sightings.thin(_sightings.new_ones(rows, group).filter(pl.col("_nth") > 0), group)
    return _sightings.example(
        _sightings.sites(trace, rows),
        mode="load",
        what=pl.col("text").str.strip_prefix("load "),
        _function="torch.utils.data.DataLoader.__next__",
        _expected="a state from which no batch was drawn before",
        _seen=_again("the state from which a batch of step {} was drawn"),
    )


def epochs(trace: Trace) -> pl.DataFrame:
    """What the order of a shuffling loader follows from is new in each epoch."""
    rows = _sightings.sightings(trace, Value.RNG).filter(pl.col("text").str.starts_with("epoch "))
    group = ["proc", "session", "text", "item"]
    rows = _sightings.thin(_sightings.new_ones(rows, group).filter(pl.col("_nth") > 0), group)
    sampler = pl.col("text").str.strip_prefix("epoch ")
    return _sightings.example(
        _sightings.sites(trace, rows),
        mode="epoch",
        what="order",
        _function=pl.when(sampler.str.starts_with("Distributed"))
        .then(pl.lit("torch.utils.data.DistributedSampler.set_epoch"))
        .otherwise(pl.lit("torch.utils.data.DataLoader.__iter__")),
        _variable=sampler,
        _expected=pl.concat_str(sampler, pl.lit(" shuffles anew")),
        _seen=_again("the same seed and epoch, or generator state, as in the epoch that began after step {}"),
    )


def workers(trace: Trace) -> pl.DataFrame:
    """Generators that loader workers draw from begin in another state in each worker, and in each epoch."""
    rows = _sightings.sightings(trace, Value.RNG).filter(pl.col("text").str.starts_with("worker "))
    end = pl.col("text").str.starts_with("worker end ")
    rows = rows.with_columns(
        pl.col("text").str.replace("^worker (end )?", "").alias("what"), end.alias("_end")
    )
    at = ["proc", "session", "seq", "text"]
    same = pl.len().over([*at, "fp"])
    among = rows.filter(pl.len().over(at) > 1).with_columns((same == 1).alias("passed"), same.alias("_same"))
    # A state that was set anew within the first batch is told by its end alone.
    when = pl.when("_end").then(pl.lit("after its first batch")).otherwise(pl.lit("before its first batch"))
    group = ["proc", "session", "text", "item"]
    later = _sightings.new_ones(rows.filter(~pl.col("_end")), group).filter(pl.col("_nth") > 0)
    columns = ["proc", "step", "seq", "text", "item", "what", "passed", "_seen", "_expected"]
    both = [
        among.with_columns(
            pl.concat_str(pl.lit("a state of its own in each worker "), when).alias("_expected"),
            pl.format("{} in one state in {} workers", "what", "_same").alias("_seen"),
        ).select(columns),
        later.with_columns(
            pl.format("{} of worker {} in a state in which it began no epoch before", "what", "item").alias(
                "_expected"
            ),
            _again("the state in which it began the epoch of step {}").alias("_seen"),
        ).select(columns),
    ]
    found = pl.concat([_sightings.thin(part, ["proc", "text"]) for part in both])
    return _sightings.example(
        _sightings.sites(trace, found).with_columns(pl.col("what").alias("_variable")),
        mode="workers",
        what="generator",
        _function="torch.utils.data.DataLoader.__iter__",
    )


def seeds(trace: Trace) -> pl.DataFrame:
    """No training step sets a seed that was set before; one row a step of a process that sets one at all."""
    calls = _frames.calls_of(trace, *(re.escape(s) for s in SEEDS))
    calls = calls.join(
        _frames.arguments(trace, calls["args"], first="0.value", named="seed.value"),
        on="args",
        how="left",
        maintain_order="left",
    )
    calls = calls.with_columns(pl.coalesce("first", "named").alias("_seed")).filter(
        pl.col("_seed").str.contains(r"^-?\d+$")
    )
    calls = _sightings.with_session(trace, calls.sort("proc", "seq"))
    calls = calls.with_columns(
        (pl.int_range(pl.len()).over("proc", "session", "fn", "_seed") > 0).alias("_again")
    )
    bad = calls.filter(pl.col("_again") & (pl.col("step") >= 0) & (pl.col("phase") == "train"))
    # A new model may begin with the old seed: its optimizer is constructed before the next update.
    if bad.height:
        model = _followed(bad, _frames.calls_of(trace, re.escape(_sightings.CREATED)), _frames.updates(trace))
        bad = _not_undone(trace, model.filter(~pl.col("_followed").fill_null(value=True)).drop("_followed"))
        bad = _not_for_evaluation(trace, bad).unique(["proc", "fn", "step"], keep="first", maintain_order=True)
    steps_ = (
        calls.select("proc", "fn")
        .unique()
        .join(_frames.seen_steps(trace).filter(pl.col("step") >= 0), on="proc")
    )
    rows = steps_.join(
        bad.select("proc", "fn", "step", "seq", "site", "_seed"), on=["proc", "fn", "step"], how="left"
    )
    rows = rows.sort("proc", "fn", "step").with_columns(pl.col("_seed").is_null().alias("passed"))
    rows = _sightings.thin(rows, ["proc", "fn"])
    rows = rows.hstack([_frames.function_names(trace, rows["fn"]).alias("what")])
    return _sightings.example(
        rows,
        mode="seed",
        _function=pl.col("what"),
        _expected="no seed that was set before",
        _seen=pl.format("{}({}) again", "what", "_seed"),
    )


def draws(trace: Trace) -> pl.DataFrame:
    """What a random function returns in training, or fills weights with before it, was not returned before."""
    rows = _sightings.sightings(trace, Value.DRAW).filter(
        ~pl.col("recompute") & ((pl.col("flags") & _FLAT) == 0)
    )
    rows = rows.join(_frames.metas(trace, "dtype", "shape"), on="meta", how="left", maintain_order="left")
    sizes = {text: _elements(text) for text in rows["shape"].drop_nulls().unique().to_list()}
    size = pl.col("shape").replace_strict(sizes, default=0, return_dtype=pl.Int64)
    rows = rows.filter(pl.col("dtype").str.contains("float") | (size >= _MIN_INTEGERS))
    # Before the training starts, data are made, and made again, with fixed seeds; weights are not.
    training = (pl.col("step") >= 0) & (pl.col("phase") == "train")
    weights = (pl.col("step") < 0) & (pl.col("text") == "fill")
    rows = _sightings.sites(trace, rows.filter(training | weights)).with_columns(
        pl.when(weights).then(pl.lit("weights")).otherwise("function").alias("what")
    )
    group = ["proc", "session", "what", "dtype", "shape"]
    rows = _sightings.new_ones(rows.filter(pl.col("what").is_not_null()), group)
    # Two models may be built from one seed; three tensors are layers of one.
    twin = (pl.col("what") == "weights") & (pl.int_range(pl.len()).over([*group, "fp"]) == 1)
    rows = rows.filter((pl.col("_nth") > 0) & ~twin)
    bad = _not_for_evaluation(trace, rows.filter(~pl.col("passed") & (pl.col("step") >= 0)))
    rows = pl.concat([rows.filter(pl.col("passed") | (pl.col("step") < 0)), bad]).sort("proc", "seq")
    rows = _sightings.thin(rows, ["proc", "session", "what"])
    seen = pl.when(pl.col("what") == "weights").then(
        pl.lit("values that an earlier tensor of this shape was filled with")
    )
    return _sightings.example(
        rows,
        mode="draw",
        _function=pl.col("function"),
        _expected="values that were not drawn before",
        _seen=seen.otherwise(_again("the values that were drawn in step {}")),
    )


def _not_undone(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows behind which the generator is not put back before a model is called or updated: a sample that a dataset makes from its number repeats by itself."""
    acts = trace.calls.filter(_frames.has(CallFlag.ROOT)), _frames.updates(trace)
    found = _followed(rows, _frames.calls_of(trace, re.escape(_PUT_BACK)), *acts)
    seeds_torch = pl.col("fn").is_in(_frames.functions_like(trace, [re.escape(_SEEDS_TORCH)])["fn"].implode())
    return found.filter(~(pl.col("_followed").fill_null(value=False) & seeds_torch)).drop("_followed")


def _followed(rows: pl.DataFrame, wanted: pl.DataFrame, *others: pl.DataFrame) -> pl.DataFrame:
    """Rows in the order of time, with `_followed`: of the calls behind them in their process a wanted one comes first; null: none comes."""
    kinds = [calls.select("proc", "seq", pl.lit(calls is wanted).alias("_followed")) for calls in (wanted, *others)]
    return rows.sort("seq").join_asof(pl.concat(kinds).sort("seq"), on="seq", by="proc", strategy="forward", check_sortedness=False)


def _not_for_evaluation(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows after which no model is called in evaluation before their step is over: that has seeds of its own."""
    if not rows.height:
        return rows
    evaluations = trace.contexts.filter(pl.col("phase") == "eval").select("ctx", "step")
    last = (
        trace.calls.join(evaluations, on="ctx")
        .group_by("proc", "step")
        .agg(pl.col("seq").max().alias("_evaluated"))
    )
    found = rows.join(last, on=["proc", "step"], how="left", maintain_order="left")
    return found.filter(pl.col("_evaluated").fill_null(0) < pl.col("seq")).drop("_evaluated")


def _again(text: str) -> pl.Expr:
    return pl.format(text, pl.col("_before"))


def _seeder(prefix: str) -> pl.Expr:
    generator = pl.col("text").str.strip_prefix(prefix)
    known = {"torch": SEEDS[0], "numpy": SEEDS[1], "python": SEEDS[2]}
    return generator.replace_strict(known, default=None, return_dtype=pl.String)


def _elements(shape: str) -> int:
    sizes = [int(n) for n in re.findall(r"\d+", shape)]
    total = 1
    for n in sizes:
        total *= n
    return total
