"""What a function gives back keeps its kind: dtype, last dimension, sign, or the answer of a check.

Catches an operation that runs in float32 inside an autocast region (lightning-thunder 725), a library that drops to
another precision, a check that begins to answer otherwise (an overflow flag that reads a neighbour's number), a
loss that turns negative. Source: TrainCheck §3.2 (APIOutput, "bound_type") and §3.5 (dtype under autocast). Differs
from it: a dtype rule of torch is learned only where autocast is at work and the call is not told the dtype; the dtypes of inputs and weights stay
conditions while all evidence agrees on them; and a region that switches autocast off inside one that has it on is
a subject of its own, named by the function that opened it (routers and losses do that on purpose).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Support
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations._surveys import Fold
from proctor.invariants.relations.views.calls import (
    FLOATING,
    cached,
    circumstances_of,
    describe,
    distinct_of,
    features_of,
    inputs_of,
    is_library,
    programs_of,
    short,
    table,
    texts,
)
from proctor.invariants.trace import Trace

# Operations that autocast runs in the low precision whatever their inputs are ("Ops that can autocast to float16",
# pytorch.org/docs/stable/amp.html), by the last part of their names.
_LOW = (
    r"\.((bi)?linear|conv(_transpose)?[123]d|matmul|b?mm|add(b?mm|bmm)|baddbmm|einsum|scaled_dot_product_attention"
    r"|Linear\.forward|Conv[123]d\.forward)$"
)
# A module whose result is that of what it holds.
_CONTAINER = r"\.(Sequential|ModuleList|DataParallel|DistributedDataParallel|FullyShardedDataParallel)\."
_RESULT = r"^out(\[[^\[\]]+\])?\."
_CHECK = r"^torch\.(distributed\.(all_reduce|reduce|all_gather|broadcast)|isfinite$|isnan$)"
_DTYPE = r"^torch\.(float|bfloat|double$|half$)"  # an argument that says what dtype is wanted
_MIN_CALLS = 4  # fewer calls do not show that an answer is constant
_MANY_CALLS = 16  # fewer do not show that a loss stays on one side of zero
_SUBJECT = ("function", "feature", "within", "program")
_CALL = ("proc", "fn", "args", "pfn", "circ", "seq", "step", "site", "calls")


@register
class Output(Relation):
    """Rules on results: `mode` is dtype, last (dimension), nonnegative, or constant."""

    name: ClassVar[str] = "output"
    code: ClassVar[str] = "PR105"
    upstream: ClassVar[int] = 3
    reads: ClassVar[Reads] = "calls"

    folds: ClassVar[Mapping[str, Fold]] = {"every": "all", "known": "any"}

    def survey(self, trace: Trace) -> pl.DataFrame:
        """Subjects by mode and value; `every`: no example failed, `known`: this shard shows that the mode applies."""
        found = []
        for mode, results in _results(trace).items():
            value = pl.col("_seen") if mode in ("dtype", "constant") else pl.lit("")
            rows = results.select(pl.lit(mode).alias("mode"), *_SUBJECT, value.alias("value"), "passed", "known")
            by = rows.group_by("mode", *_SUBJECT, "value")
            found.append(by.agg(pl.col("passed").all().alias("every"), pl.col("known").any()))
        return self.merge(found)

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        if survey.is_empty():
            return []
        # Nothing that is said of other calls would tell when their rule holds, so it must always.
        sometimes = pl.col("mode").is_in(["dtype", "constant"])
        kept = survey.filter(pl.col("known").any().over("mode", "function") & (sometimes | pl.col("every")))
        found = []
        for row in kept.select("mode", *_SUBJECT, "value").iter_rows(named=True):
            row["fn"] = row.pop("function")
            found.append(Hypothesis.of(self.name, **{k: v for k, v in row.items() if v}))
        return sorted(found, key=lambda h: h.params)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        wanted = table(hypotheses, "mode", "fn", *_SUBJECT[1:], "value").rename({"fn": "function"})
        frames = []
        for mode, results in _results(trace).items():
            rows = wanted.filter(pl.col("mode") == mode).drop("mode").join(results, on=_SUBJECT)
            rows = rows.with_columns(
                pl.coalesce("passed", pl.col("_seen") == pl.col("value")).alias("passed")
            )
            frames.append(rows.select("hyp", "passed", "_seen", "function", "program", *_CALL))
        frame = pl.concat(frames)
        codes = frame["fn"].unique().to_list()
        frame, names = describe(trace, frame.drop("fn"), codes)
        low = pl.col("function").str.contains(_LOW) & (pl.col("outer") != "")
        # A library's function is anchored by its name.
        anchored = pl.col("function").map_elements(is_library, return_dtype=pl.Boolean) & (
            pl.col("program") == ""
        )
        frame = frame.with_columns(
            pl.when(~low).then("inputs").alias("inputs"), pl.when(~anchored).then("family").alias("family")
        ).drop("function", "program")
        scope = ("autocast", "outer", "inputs", "device", "weights", "family")
        fields = ("autocast", "outer", "inputs", *names, "grad", "parent", "phase", "recompute", *scope[3:])
        return Examples(frame.sort("hyp", "proc", "seq"), fields, scope)

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        """A constant answer of a library's function may be a habit of one run."""
        return hypothesis["mode"] != "constant" or bool(hypothesis.get("program")) or support.runs > 1

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        return frozenset({hypothesis.text("fn")})

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        return frozenset({(hypothesis.text("fn"), hypothesis.text("feature"))})

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("fn"), hypothesis.text("within")} - {""}))

    def say(self, hypothesis: Hypothesis) -> str:
        function, what = hypothesis.text("fn"), _words(hypothesis.text("feature"))
        within = hypothesis.text("within")
        match hypothesis["mode"]:
            case "dtype":
                where = f", when {within} calls it with autocast switched off," if within else ""
                return f"{function}{where} returns {what} of dtype {hypothesis['value']}"
            case "last":
                return f"{function} returns {what} whose last dimension stays the same"
            case "nonnegative":
                return f"{function} never returns a negative number"
        return f"{function} always returns {hypothesis['value']}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        function, seen = hypothesis.text("fn"), example.get("_seen")
        label, what = example.get("0.name"), _words(hypothesis.text("feature"))
        subject = f"{label} ({short(function)})" if label else short(function)
        expected, found = f"{subject} returns {hypothesis.get('value')}", f"it returned {seen}"
        advice = f"look at what {subject} reads: a number of another rank, a wrong group, a wrong sign"
        match hypothesis["mode"]:
            case "dtype":
                region = f" inside an autocast({example['outer']}) region" if example.get("outer") else ""
                expected = f"output dtype {hypothesis['value']} of {subject}{region}"
                found = f"{what} of dtype {seen}"
                advice = (
                    f"see what casts the arguments of {subject}: autocast is off there, or a cast is missing"
                )
            case "last":
                expected = f"{subject} returns {what} with the last dimension of its first call"
                found = f"last dimension {seen}"
                advice = f"compare what {subject} was given at this call and before"
            case "nonnegative":
                expected = f"{subject} returns a number that is not negative"
        module = str(example.get("0.type") or "") if function.endswith(".forward") else ""
        return Detail(expected=expected, seen=found, function=function, module=module, advice=advice)


def _words(feature: str) -> str:
    path = feature.rpartition(".")[0]
    return "a tensor" if path == "out" else "a tensor " + path.removeprefix("out")


def _results(trace: Trace) -> dict[str, pl.DataFrame]:
    """For each mode its results: the subject, what was seen, passed (null: compare with the value), known, and the call.

    known: this trace shows that the mode speaks of the function: it runs under autocast, or checks something.
    """
    return cached(trace, "output", lambda: _build(trace))


def _build(trace: Trace) -> dict[str, pl.DataFrame]:
    calls = (
        distinct_of(trace)
        .join(texts(trace.functions, "fn", "function"), on="fn")
        .join(texts([n or "the script" for n in trace.functions], "pfn", "caller"), on="pfn", how="left")
        .join(circumstances_of(trace).select("circ", "autocast", "outer"), on="circ", how="left")
        .join(programs_of(trace).select("proc", pl.col("program").alias("own")), on="proc", how="left")
        .join(inputs_of(trace).select("args", "inputs"), on="args", how="left")
        .filter(pl.col("function") != "")
    )
    torch = pl.col("function").str.starts_with("torch.")
    script = pl.col("function").str.starts_with("__main__.")
    makes = (
        torch & (pl.col("inputs") == "none") & ~pl.col("function").str.ends_with(".forward")
    )  # its dtype is asked for
    library_caller = ~pl.col("caller").str.starts_with("__main__.") & (pl.col("pfn") != 0)
    results = features_of(trace).filter(pl.col("name").str.contains(_RESULT))
    results = results.rename({"code": "ret", "name": "feature", "value": "_seen"})

    # A call that is given a dtype returns that one: what is said of it would be said of the caller's wish.
    asked = features_of(trace).filter(pl.col("name").str.ends_with(".value") & pl.col("value").str.contains(_DTYPE))
    free = calls.join(asked.select(pl.col("code").alias("args")).unique(), on="args", how="anti", maintain_order="left")
    # Of torch's operations only those that some program uses under autocast have a precision worth a rule.
    mixed = free.filter(torch & (pl.col("outer") != "")).select("function", known=pl.lit(value=True)).unique()
    own = calls.filter(~torch)
    off = (pl.col("outer") != "") & (pl.col("autocast") == "")
    bound = script | pl.col("function").str.contains(_CONTAINER) | (off & (~library_caller))
    # Later items of a list are often other arguments, passed through.
    floating = results.filter(
        pl.col("feature").str.contains(r"^out(\[0\]|\['.*)?\.dtype$") & pl.col("_seen").str.contains(FLOATING)
    )
    dtype = (
        pl.concat(
            [
                own.with_columns(known=pl.lit(value=True)),
                free.filter(torch & ~makes).join(mixed, on="function", how="left").with_columns(pl.col("known").fill_null(value=False)),
            ]
        )
        .join(floating, on="ret")
        .with_columns(
            pl.when(off).then("caller").otherwise(pl.lit("")).alias("within"),
            pl.when(bound).then("own").otherwise(pl.lit("")).alias("program"),
            pl.lit(None, pl.Boolean).alias("passed"),
        )
    )
    own = own.with_columns(pl.lit("").alias("within"), pl.col("own").alias("program"))
    lasts = (
        results.filter(pl.col("feature").str.contains(r"^out\.shape\[\d\]$"))
        .sort("ret", "feature")
        .with_columns(pl.col("feature").str.replace(r"shape\[\d\]$", "shape[-1]"))
        .group_by("ret", "feature")
        .agg(pl.col("_seen").last())
    )
    last = (
        own.filter(pl.col("function").str.ends_with(".forward"))
        .join(lasts, on="ret")
        .sort("proc", "seq")
        .with_columns((pl.col("_seen") == pl.col("_seen").first().over("proc", "function")).alias("passed"))
        .filter(pl.col("calls").sum().over("proc", "function") >= _MIN_CALLS)
    )
    plain = own.join(results.filter(pl.col("feature") == "out.value"), on="ret").filter(
        pl.col("calls").sum().over("proc", "function") >= _MIN_CALLS
    )
    negative = pl.col("_seen").cast(pl.Float64, strict=False) < 0
    numbers = plain.filter(
        (pl.col("kind") == "f") & (pl.col("calls").sum().over("proc", "function") >= _MANY_CALLS)
    )
    numbers = numbers.with_columns((~negative).alias("passed"))
    # A predicate is for saying yes and no. What asks other ranks, or looks for NaN, is a check that should pass.
    checks = calls.filter(pl.col("function").str.contains(_CHECK)).select(pl.col("pfn").alias("fn"), known=pl.lit(value=True)).unique()
    answers = (
        plain.filter(pl.col("kind") == "b")
        .join(checks, on="fn", how="left")
        .with_columns(
            pl.col("known").fill_null(value=False),
            pl.when(script).then("own").otherwise(pl.lit("")).alias("program"),
            pl.lit(None, pl.Boolean).alias("passed"),
        )
    )
    last, numbers = (frame.with_columns(known=pl.lit(value=True)) for frame in (last, numbers))
    modes = {"dtype": dtype, "last": last, "nonnegative": numbers, "constant": answers}
    return {mode: frame.select(*_SUBJECT, "_seen", "passed", "known", *_CALL) for mode, frame in modes.items()}
