"""Training steps as windows: which functions of the training loop ran in each.

A token is what a rule of `sequence` speaks of: a function of the training API, where ways to do the same are one
(`autograd.backward` is `Tensor.backward`, `Module.zero_grad` is `Optimizer.zero_grad`, any outermost module is the model),
or a function of the user that nearly every step calls.
"""

from __future__ import annotations

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import (
    cached,
    calls_of,
    circumstances_of,
    features_of,
    is_torch,
    lossless,
    programs_of,
    texts,
)
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

STEP = "torch.optim.Optimizer.step"
ZERO_GRAD = "torch.optim.Optimizer.zero_grad"
BACKWARD = "torch.Tensor.backward"
SET_EPOCH = "torch.utils.data.DistributedSampler.set_epoch"
SAMPLER_ITER = "torch.utils.data.DistributedSampler.__iter__"
_ALIASES = {"torch.autograd.backward": BACKWARD, "torch.nn.Module.zero_grad": ZERO_GRAD}
_API = (
    r"^torch\.(optim\.Optimizer\.step|optim\.lr_scheduler\.LRScheduler\.step|nn\.utils\.clip_grad_\w+"
    r"|amp\.GradScaler\.(scale|unscale_|step|update)|nn\.parallel\.DistributedDataParallel\.forward"
    r"|distributed\.(all_reduce|broadcast|all_gather|all_gather_into_tensor|reduce_scatter|reduce_scatter_tensor))$"
)
_OFTEN = 0.8  # share of the steps in which a function of the user belongs to the loop
_MAX_TOKENS = 60  # functions of the user by process


def _tokens(trace: Trace) -> pl.DataFrame:
    """Calls of tokens in steps: proc, step, token, seq, site, micro, phase."""
    return cached(trace, "tokens", lambda: _build(trace))


def _build(trace: Trace) -> pl.DataFrame:
    names = [_ALIASES.get(n, n) for n in trace.functions]
    known = texts(names, "fn", "token").filter(
        pl.col("token").is_in([BACKWARD, ZERO_GRAD]) | pl.col("token").str.contains(_API)
    )
    steps = calls_of(trace).filter(pl.col("step") >= 0)
    inner = _frames.inner_clippings(trace).select("proc", pl.col("call").alias("seq"))
    api = steps.join(known, on="fn").join(inner, on=["proc", "seq"], how="anti")
    phases = circumstances_of(trace).select("circ", "phase", "grad")
    # A backward of double differentiation or of a checkpoint's second forward runs inside another one.
    roots = (
        steps.filter("root")
        .join(phases, on="circ")
        .filter((pl.col("grad") == "true") & (pl.col("phase") == "train"))
    )
    roots = roots.with_columns(pl.lit(MODEL_CALL).alias("token"))
    users = texts(
        [n if n and not is_torch(n) and not n.endswith(".forward") else None for n in trace.functions],
        "fn",
        "token",
    )
    own = steps.join(users.drop_nulls(), on="fn")
    total = steps.group_by("proc").agg(pl.col("step").n_unique().alias("steps"))
    often = (
        own.group_by("proc", "fn")
        .agg(pl.col("step").n_unique().alias("n"), pl.len().alias("calls"), pl.col("pfn").first())
        .join(total, on="proc")
        .filter((pl.col("n") >= _OFTEN * pl.col("steps")) & (pl.col("steps") >= 3))
    )
    # Called by another function of the loop: that one contains it, which is the relation `contain`.
    often = often.join(often.select("proc", pl.col("fn").alias("pfn")), on=["proc", "pfn"], how="anti")
    often = often.sort("proc", "calls").group_by("proc", maintain_order=True).head(_MAX_TOKENS)
    own = own.join(often.select("proc", "fn"), on=["proc", "fn"], how="semi")
    columns = ["proc", "step", "token", "seq", "site", "micro"]
    return pl.concat([api.select(columns), roots.select(columns), own.select(columns)])


def first_calls(trace: Trace) -> pl.DataFrame:
    """First call of each token in each step: proc, step, token, seq, site."""
    return cached(
        trace,
        "first_calls",
        lambda: (
            _tokens(trace)
            .group_by("proc", "step", "token")
            .agg(pl.col("seq", "site").sort_by("seq").first())
            .sort("proc", "step", "seq")
        ),
    )


def between_passes(trace: Trace, pairs: pl.DataFrame) -> pl.DataFrame:
    """Pairs of an update (`seq_a`) and what ran before it (`seq_b`) in its step with another backward pass between: that goes by passes, and not by updates."""
    known = pairs.select("proc", "step", "seq_a", "seq_b").unique()
    passes = known.join(_tokens(trace).filter(pl.col("token") == BACKWARD).select("proc", "step", "seq"), on=["proc", "step"])
    return passes.filter((pl.col("seq") > pl.col("seq_b")) & (pl.col("seq") < pl.col("seq_a"))).select(known.columns).unique()


def called(trace: Trace, tokens: pl.Series) -> pl.DataFrame:
    """As `first_calls`, of these tokens, also those that too few steps call to be part of the loop."""
    known = first_calls(trace).filter(pl.col("token").is_in(tokens.implode()))
    wanted = {token for token in tokens if token and not is_torch(token) and token != MODEL_CALL}
    own = texts([n if n in wanted else None for n in trace.functions], "fn", "token").drop_nulls()
    calls = calls_of(trace).filter(pl.col("step") >= 0).join(own, on="fn").join(known, on=["proc", "token"], how="anti")
    seldom = calls.group_by("proc", "step", "token").agg(pl.col("seq", "site").sort_by("seq").first())
    return pl.concat([known, seldom.select(known.columns)])


def windows(trace: Trace) -> pl.DataFrame:
    """Steps that a rule may speak of: proc, step, whole, opened, scaled.

    whole: no record of the process was lost. opened: the act that began the step is recorded; where not every step is
    recorded, it may be missing in the first of a block of steps. scaled: a loss scaler is used.
    The last step of a process is left out: it may be cut, or be what the loop does after its last update.
    """

    def build() -> pl.DataFrame:
        yes = pl.lit(value=True)
        firsts = first_calls(trace)
        step = pl.col("step")
        steps = firsts.group_by("proc", "step").agg(pl.len().alias("acts")).sort("proc", "step")
        steps = steps.filter(step < step.max().over("proc"))
        # One act alone, where other steps have more, is what is left of a step that was not recorded.
        steps = steps.filter((pl.col("acts") > 1) | (pl.col("acts").max().over("proc") == 1))
        before = step.shift(1).over("proc")
        steps = steps.select("proc", "step", (step - before == 1).fill_null(step == 0).alias("opened"))
        scaler = pl.col("token").str.starts_with("torch.amp.GradScaler.")
        scaled = firsts.filter(scaler).select("proc").unique().with_columns(scaled=yes)
        return (
            steps.join(lossless(trace).with_columns(whole=yes), on="proc", how="left")
            .join(scaled, on="proc", how="left")
            .with_columns(pl.col("whole", "scaled").fill_null(value=False))
        )

    return cached(trace, "windows", build)


def owners(trace: Trace, tokens: pl.Series) -> pl.DataFrame:
    """Of these tokens, those whose class (or which themselves, if functions) a run uses at all: run, a."""
    runs = trace.procs.select("proc", "run")
    used = calls_of(trace).select("proc", "fn").unique().join(runs, on="proc")
    names = texts([_ALIASES.get(n, n) for n in trace.functions], "fn", "a")
    used = used.join(names, on="fn").select("run", _owner(pl.col("a")).alias("owner")).unique()
    wanted = pl.DataFrame({"a": tokens.unique()}).with_columns(_owner(pl.col("a")).alias("owner"))
    models = _tokens(trace).filter(pl.col("token") == MODEL_CALL).select("proc").unique().join(runs, on="proc")
    methods = used.join(wanted.filter(pl.col("a") != MODEL_CALL), on="owner").select("run", "a")
    return pl.concat([methods, models.select("run", pl.lit(MODEL_CALL).alias("a"))]).unique()


def _owner(name: pl.Expr) -> pl.Expr:
    """The class of a method (its last but one part is capitalised), else the function itself.

    That some method of a tensor is called says nothing on whether the program uses `backward`.
    """
    parent = name.str.replace(r"\.[^.]+$", "")
    return (
        pl.when(parent.str.contains(r"(^|\.)_?[A-Z][^.]*$") & (name != BACKWARD)).then(parent).otherwise(name)
    )


def circumstances(trace: Trace) -> pl.DataFrame:
    """Fields of each step: proc, step, optimizers, closure, scaler, accumulates, first, world, wrapper, family."""

    def build() -> pl.DataFrame:
        tokens = _tokens(trace)
        yes = pl.lit("true")
        features = features_of(trace)
        # Any method: an optimizer that is never stepped is one, too.
        methods = texts(trace.functions, "fn", "function").filter(
            pl.col("function").str.starts_with("torch.optim.Optimizer.")
        )
        calls = calls_of(trace).join(methods, on="fn")
        names = features.filter(pl.col("name") == "0.name").select(
            pl.col("code").alias("args"), pl.col("value").alias("optimizer")
        )
        closures = features.filter(
            pl.col("name").is_in(["1.value", "closure.value"]) & (pl.col("kind") == "c")
        )
        by_proc = (
            calls.join(names, on="args", how="left")
            .join(
                closures.select(pl.col("code").alias("args"), has=pl.lit(value=True)).unique(),
                on="args",
                how="left",
            )
            .group_by("proc")
            .agg(
                pl.when(pl.col("optimizer").drop_nulls().n_unique() > 1)
                .then(pl.lit("several"))
                .otherwise(pl.lit("one"))
                .alias("optimizers"),
                pl.when((pl.col("has") & (pl.col("function") == STEP)).any())
                .then(yes)
                .otherwise(pl.lit("false"))
                .alias("closure"),
            )
        )
        inside = _frames.inner_backwards(trace).select("proc").unique().with_columns(_inside=yes)
        by_proc = by_proc.join(inside, on="proc", how="left").with_columns(pl.coalesce("_inside", "closure").alias("closure")).drop("_inside")
        scaled = windows(trace).filter("scaled").select("proc").unique().with_columns(scaler=yes)
        micro = tokens.group_by("proc").agg(
            pl.when(pl.col("micro").max() > 0).then(yes).otherwise(pl.lit("false")).alias("accumulates")
        )
        wrapper = pl.DataFrame(schema={"proc": pl.UInt16, "wrapper": pl.String})
        if "wrapper" in trace.metas.columns:
            wrapper = (
                trace.states.select("proc", "meta")
                .unique()
                .join(trace.metas.select("meta", "wrapper"), on="meta")
                .group_by("proc")
                .agg(pl.col("wrapper").max())
            )
        world = pl.when(pl.col("world") > 1).then(pl.lit("several")).otherwise(pl.lit("one"))
        return (
            tokens.select("proc", "step")
            .unique()
            .with_columns(
                pl.when(pl.col("step") == pl.col("step").min().over("proc"))
                .then(pl.lit("first"))
                .otherwise(pl.lit("later"))
                .alias("first")
            )
            .join(by_proc, on="proc", how="left")
            .join(scaled, on="proc", how="left")
            .join(micro, on="proc", how="left")
            .join(trace.procs.select("proc", world.alias("world")), on="proc", how="left")
            .join(wrapper, on="proc", how="left")
            .join(programs_of(trace).select("proc", "family"), on="proc", how="left")
            .with_columns(
                pl.col("scaler", "closure").fill_null("false"), pl.col("optimizers").fill_null("none")
            )
        )

    return cached(trace, "step_circumstances", build)


def renewals(trace: Trace) -> pl.DataFrame:
    """Passes of the training over a shuffling sampler but the first of each process: proc, step, seq, site, passed.

    passed: `set_epoch` was called since the pass before. Without it each epoch has the order of the first. An evaluation may
    have the same order each time: its next forward has no gradients.
    """

    def build() -> pl.DataFrame:
        features = features_of(trace)
        shuffles = features.filter((pl.col("name") == "0.shuffle") & (pl.col("value") == "true"))
        passes = calls_of(trace).join(shuffles.select(pl.col("code").alias("args")), on="args", how="semi")
        passes = passes.join(named(trace, SAMPLER_ITER), on=["proc", "seq"], how="semi").sort("seq")
        if not passes.height:
            return passes.select("proc", "step", "seq", "site", pl.lit(None, dtype=pl.Boolean).alias("passed"))
        phases = circumstances_of(trace).select("circ", ((pl.col("grad") == "true") & (pl.col("phase") == "train")).alias("_trains"))
        runs = calls_of(trace).filter("root").join(phases, on="circ").select("proc", "seq", "_trains").sort("seq")
        passes = passes.join_asof(runs, on="seq", by="proc", strategy="forward", check_sortedness=False)
        passes = passes.filter(pl.col("_trains").fill_null(value=False)).drop("_trains").sort("proc", "seq")
        passes = passes.with_columns(pl.col("seq").shift(1).over("proc").alias("_last")).drop_nulls("_last")
        set_ = named(trace, SET_EPOCH).with_columns(pl.col("seq").alias("_set")).sort("seq")
        found = passes.sort("seq").join_asof(
            set_, on="seq", by="proc", strategy="backward", check_sortedness=False
        )
        found = found.join(lossless(trace).with_columns(whole=pl.lit(value=True)), on="proc", how="left")
        passed = (pl.col("_set") > pl.col("_last")).fill_null(value=False)
        decided = passed | pl.col("whole").fill_null(value=False)
        return found.select("proc", "step", "seq", "site", pl.when(decided).then(passed).alias("passed"))

    return cached(trace, "renewals", build)


def named(trace: Trace, *names: str) -> pl.DataFrame:
    codes = [trace.function_code[n] for n in names if n in trace.function_code]
    return calls_of(trace).filter(pl.col("fn").is_in(codes)).select("proc", "seq")
