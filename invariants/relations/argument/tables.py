"""The evidence of `argument`, one table a mode: what was given in which call, and whether it kept the pattern.

Columns: `function`, `feature`, `caller`, `program` name the subject ("" where it plays no part); `passed` (null: not
decided), `_seen` the value; the call (proc, seq, step, site, circ) and two fields, `roots` and `class`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from proctor.invariants.codec.signature import Plain
from proctor.invariants.relations.argument import model_modes as _modes
from proctor.invariants.relations.argument import switches as _switches
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import (
    cached,
    calls_of,
    circumstances_of,
    codes_where,
    features_of,
    is_torch,
    programs_of,
    short,
    texts,
)
from proctor.invariants.schema import CallFlag
from proctor.invariants.trace import Trace

SUBJECT = ("function", "feature", "caller", "program")
GROUP = "group"
_COLUMNS = (*SUBJECT, "passed", "_seen", "proc", "seq", "step", "site", "circ", "roots", "class")
_COLLECTIVE = (
    r"^torch\.distributed\.(all_reduce|broadcast|all_gather(_into_tensor)?|reduce_scatter(_tensor)?|reduce"
    r"|all_to_all_single|gather|scatter)$"
)
# Whatever the program: these exist to be equal on all ranks, or to change from call to call.
SHARED_BY_RANKS = ("torch.utils.data.DistributedSampler.set_epoch",)
_COUNTING = ("torch.utils.data.DistributedSampler.set_epoch",)
_SEEDS = ("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
DROPOUT = "torch.nn.functional.dropout"  # what the rule calls all of these
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
DROPOUTS = frozenset({*(f"{DROPOUT}{d}" for d in ("", "1d", "2d", "3d")), *(f"torch.nn.functional.{n}_dropout" for n in ("alpha", "feature_alpha")), ATTENTION})
_MAX_DEPTH = 24  # of modules in modules
_MIN_CALLS = 4  # fewer show no pattern
_MAX_CALLS = 20_000  # by function and process; a hotter one takes no arguments that are worth a rule
_EMPTY = pl.DataFrame(
    schema={
        **dict.fromkeys((*SUBJECT, "_seen", "roots", "class"), pl.String),
        "passed": pl.Boolean,
        "proc": pl.UInt16,
        "seq": pl.UInt32,
        "step": pl.Int32,
        "site": pl.UInt32,
        "circ": pl.UInt32,
    }
).select(_COLUMNS)


def tables(trace: Trace) -> dict[str, pl.DataFrame]:
    """Evidence by mode."""
    return cached(trace, "argument", lambda: _build(trace))


def _build(trace: Trace) -> dict[str, pl.DataFrame]:
    given, collectives = _given(trace), _collectives(trace)
    ranks = _by_rank(trace, given, collectives)
    modes = _modes.model_modes(trace)
    training, evaluating = (_EMPTY, _EMPTY) if modes is None else (_row(found, "passed") for found in modes)
    return {
        "passes": pl.concat([_passes(trace, collectives), _row(_switches.given(trace), "passed")]),
        "same": _same(trace, given),
        "ranks_same": _row(ranks, "_same"),
        "ranks_distinct": _row(
            ranks.filter((pl.col("kind") == "i") & (pl.col("function").is_in(_SEEDS) | pl.col("own_code"))),
            "_distinct",
        ),
        "never_repeats": _never_repeats(trace, given),
        "training": training,
        "evaluating": evaluating,
        "dropping": _dropping(trace),
    }


def _row(frame: pl.DataFrame, passed: str) -> pl.DataFrame:
    missing = [pl.lit(None, pl.String).alias(c) for c in ("roots", "class") if c not in frame.columns]
    blank = [pl.lit("").alias(c) for c in ("caller", "program") if c not in frame.columns]
    return frame.with_columns(pl.col(passed).alias("passed"), *missing, *blank).select(_COLUMNS)


def _given(trace: Trace) -> pl.DataFrame:
    """Plain values given to the user's functions and to torch's seeds and counters, one row a call and argument."""
    codes = codes_where(trace, lambda n: not is_torch(n) or n in _SEEDS or n in _COUNTING)
    few = calls_of(trace).filter(pl.col("fn").is_in(codes)).filter(pl.len().over("proc", "fn") <= _MAX_CALLS)
    plain = features_of(trace).filter(
        pl.col("name").str.contains(r"^[^\[\].]+\.value$") & pl.col("kind").is_in(["b", "i", "s"])
    )
    return (
        few.join(
            plain.select(
                pl.col("code").alias("args"),
                pl.col("name").alias("feature"),
                pl.col("value").alias("_seen"),
                "kind",
            ),
            on="args",
        )
        .join(texts(trace.functions, "fn", "function"), on="fn")
        .join(programs_of(trace).select("proc", "program"), on="proc")
        .with_columns((~pl.col("function").str.starts_with("torch.")).alias("own_code"))
        .drop("args", "ret", "fn", "root", "micro")
    )


def _collectives(trace: Trace) -> pl.DataFrame:
    """Collectives with what they were given: group (default, explicit), operation, dtype, shape."""
    functions = texts(trace.functions, "fn", "function").filter(pl.col("function").str.contains(_COLLECTIVE))
    calls = calls_of(trace).join(functions, on="fn")
    features = features_of(trace).rename({"code": "args", "name": "feature", "value": "_seen"})
    features = features.join(calls.select("args").unique(), on="args", how="semi")
    named = features.filter(pl.col("feature") == "group.name").select("args", pl.col("_seen").alias("named"))
    typed = features.filter((pl.col("feature") == "group.type") & (pl.col("_seen") != "NoneType")).select(
        "args", given=True
    )
    return (
        calls.join(named, on="args", how="left")
        .join(typed, on="args", how="left")
        .with_columns(
            pl.when(pl.col("given").is_null())
            .then(pl.lit("default"))
            .otherwise(pl.lit("explicit"))
            .alias(GROUP),
            # Of what is not the whole world, ranks have groups of their own.
            (
                pl.col("given").is_null() | pl.col("named").str.starts_with("world").fill_null(value=False)
            ).alias("whole"),
        )
        .drop("named", "given", "ret", "fn", "root", "micro")
    )


def _features(trace: Trace, calls: pl.DataFrame, pattern: str) -> pl.DataFrame:
    wanted = (
        features_of(trace)
        .filter(pl.col("name").str.contains(pattern))
        .select(
            pl.col("code").alias("args"),
            pl.col("name").alias("feature"),
            pl.col("value").alias("_seen"),
            "kind",
        )
    )
    return calls.join(wanted, on="args")


def _passes(trace: Trace, collectives: pl.DataFrame) -> pl.DataFrame:
    """What each function of a library or the script gives to the collectives that it calls."""
    callers = texts([n or None for n in trace.functions], "pfn", "caller").drop_nulls()
    own = programs_of(trace).select("proc", pl.col("program").alias("own"))
    calls = (
        collectives.join(callers, on="pfn")
        .join(own, on="proc")
        .filter(~pl.col("caller").str.starts_with("torch."))
        .with_columns(
            pl.when(pl.col("caller").str.starts_with("__main__."))
            .then("own")
            .otherwise(pl.lit(""))
            .alias("program")
        )
    )
    groups = calls.with_columns(
        pl.lit(GROUP).alias("feature"), pl.col(GROUP).alias("_seen"), pl.lit("s").alias("kind")
    )
    others = _features(trace, calls, r"^(op\.(value|name)|0\.dtype)$")
    both = pl.concat([groups.select(others.columns), others]).with_columns(
        pl.lit(None, pl.Boolean).alias("passed")
    )
    return _row(both, "passed")


def _same(trace: Trace, given: pl.DataFrame) -> pl.DataFrame:
    """Words and switches that are the same in all calls of a process. Numbers count something."""
    one = ("proc", "function", "feature")
    rows = given.filter(pl.col("own_code") & pl.col("kind").is_in(["b", "s"])).sort("proc", "seq")
    # A truth value of each epoch may be a result (`is_best`) that was the same by chance, or since training went well.
    steps = calls_of(trace).group_by("proc").agg(pl.col("step").n_unique().alias("_steps"))
    rows = rows.join(steps, on="proc", maintain_order="left")
    often = (pl.col("kind") != "b") | (2 * pl.len().over(one) >= pl.col("_steps"))
    rows = rows.filter((pl.len().over(one) >= _MIN_CALLS) & often).drop("_steps")
    first = pl.col("seq") == pl.col("seq").min().over(one)
    rows = rows.with_columns((pl.col("_seen") == pl.col("_seen").first().over(one)).alias("passed")).filter(
        ~first
    )
    return _row(rows, "passed")


def _by_rank(trace: Trace, given: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """The k-th call of a function in a step against the k-th call on the other ranks of the run.

    Where ranks made different numbers of calls, which of them belong together is not known.
    """
    whole = _features(trace, collectives.filter("whole"), r"^0\.(shape\[\d\]|dtype)$").drop(
        GROUP, "whole", "args"
    )
    whole = whole.with_columns(pl.lit("").alias("program"), pl.lit(value=False).alias("own_code"))
    free = pl.col("function").is_in(SHARED_BY_RANKS)
    given = given.with_columns(pl.when(free).then(pl.lit("")).otherwise("program").alias("program"))
    # Ranks of one program; another family on another rank (a pipeline) makes calls of its own.
    rows = pl.concat([given, whole.select(given.columns)]).join(
        trace.procs.filter(pl.col("world") > 1).select("proc", "run", "world"), on="proc"
    )
    call = ("run", "step", "function", "feature")
    rows = rows.sort("proc", "seq").with_columns(pl.int_range(pl.len()).over("proc", *call).alias("k"))
    peers = (*call, "k")
    rows = rows.with_columns(
        pl.len().over("proc", *call).alias("count"), pl.col("proc").n_unique().over(call).alias("ranks")
    ).with_columns(
        (
            (pl.col("ranks") == pl.col("world"))
            & (pl.col("count").min().over(call) == pl.col("count").max().over(call))
        ).alias("complete"),
        pl.col("_seen").n_unique().over(peers).alias("values"),
    )
    decided = pl.when("complete")
    return rows.with_columns(
        decided.then(pl.col("values") == 1).alias("_same"),
        decided.then(pl.col("values") == pl.col("ranks")).alias("_distinct"),
    )


def _never_repeats(trace: Trace, given: pl.DataFrame) -> pl.DataFrame:
    """Epochs and seeds: numbers given less often than once in two steps, so that no loop index restarts among them."""
    one = ("proc", "function", "feature")
    steps = calls_of(trace).group_by("proc").agg(pl.col("step").n_unique().alias("steps"))
    rows = given.filter(pl.col("kind") == "i").join(steps, on="proc")
    rows = rows.filter((pl.len().over(one) >= _MIN_CALLS) & (2 * pl.len().over(one) <= pl.col("steps")))
    free = pl.col("function").is_in(_COUNTING)
    rows = rows.sort("proc", "seq").with_columns(
        (pl.col("seq") == pl.col("seq").min().over(*one, "_seen")).alias("passed"),
        pl.when(free).then(pl.lit("")).otherwise("program").alias("program"),
    )
    return _row(rows.filter(pl.col("seq") != pl.col("seq").min().over(one)), "passed")


def _dropping(trace: Trace) -> pl.DataFrame:
    """Functional dropout inside models that evaluate."""
    names = texts(trace.functions, "fn", "function")
    drops = names.filter(pl.col("function").is_in(list(DROPOUTS)))
    fn = trace.calls["fn"].to_numpy()
    at = np.flatnonzero(np.isin(fn, drops["fn"].to_numpy()))
    if not len(at):
        return _EMPTY
    up, root = _frames.enclosing(trace), (trace.calls["flags"].to_numpy() & int(CallFlag.ROOT)) != 0
    top = up[at]
    for _ in range(_MAX_DEPTH):
        top = np.where((top >= 0) & ~root[top], up[top], top)
    inside = (top >= 0) & root[top]
    at, top = at[inside], top[inside]
    args = trace.calls["args"].to_numpy()
    flags = pl.Series([trace.features[c].get("0.training") for c in args[top]], dtype=pl.Boolean)
    inner = [i >= 0 and trace.functions[fn[i]].startswith("torch.") for i in up[at]]
    told = [_keeps_all(trace.functions[f], trace.features[c], i) for f, c, i in zip(fn[at], args[at], inner, strict=True)]
    passed, seen = pl.Series([keeps for keeps, _ in told], dtype=pl.Boolean), pl.Series([said for _, said in told], dtype=pl.String)
    rows = pl.DataFrame({"proc": trace.calls["proc"][at], "seq": trace.calls["seq"][at], "model": flags, "passed": passed, "_seen": seen})
    rows = rows.filter(~pl.col("model") & pl.col("passed").is_not_null()).unique(["proc", "seq"])
    rows = rows.join(calls_of(trace).drop("args", "ret"), on=["proc", "seq"]).join(names, on="fn")
    # A part of the model that trains while the rest evaluates has gradients, and its attention drops rightly.
    evaluates = pl.col("circ").is_in(circumstances_of(trace).filter(pl.col("grad") == "false")["circ"].to_list())
    rows = rows.filter((pl.col("function") != ATTENTION) | pl.col("passed") | evaluates)
    return _row(rows.with_columns(pl.lit("training.value").alias("feature"), pl.lit(DROPOUT).alias("function")), "passed")


def _keeps_all(function: str, given: Mapping[str, Plain], inner: bool) -> tuple[bool | None, str]:
    """Whether a call is told to drop nothing, and what it says; `None` where whoever wrote it means it to drop, or it says nothing.

    `training` is true unless it is given. Who writes `training=True` means it, and what a dropout module does is what it was set to. With a probability of zero it says nothing.
    Attention has only a probability, zero unless it is given.

    Args:
        given: features of its arguments.
        inner: a function of torch calls it.
    """
    name = short(function)
    if function == ATTENTION:
        p = given.get("dropout_p.value", given.get("4.value", ""))
        return (None if p == "" or (p and inner) else not p), f"{name} is given dropout_p={p}"
    p, told = given.get("p.value", given.get("1.value", "")), given.get("training.value", given.get("2.value", ""))
    if told == "" or p == 0:
        return (None if inner or p == 0 else False), f"{name} is not told whether it trains, and drops then"
    return (None if told else True), f"{name} is told that it does not train"
