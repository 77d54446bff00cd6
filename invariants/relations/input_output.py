"""A size or dtype of what a function returns equals one of what it was given.

Catches a processor that merges all images into the first sample (transformers 34204: as many rows as texts went in),
a collate or pooling step that drops or repeats samples, a wrapper that loses the dtype. Source: TrainCheck §3.2
(APIOutput with a bound on an input, Table 2). Differs from it: only functions of the user's own code and libraries
are looked at (that `linear` keeps the batch is torch's business), and an equality must be seen at two values, or be one
of leading dimensions, so that two sizes that happen to be equal make no rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations._surveys import Fold
from proctor.invariants.relations.views.calls import (
    FLOATING,
    cached,
    describe,
    distinct_of,
    features_of,
    is_library,
    programs_of,
    short,
    table,
    texts,
)
from proctor.invariants.trace import Trace

_RESULT = r"^out(\[[^\[\]]+\])?\.(shape\[[0-3]\]|len|dtype)$"
_GIVEN = r"^[^\[\].]+(\[0\])?\.(shape\[[0-3]\]|len|dtype|value)$"
# What all samples share; the first item of a list says nothing about the others.
_LEADING = r"^(out(\[.*\])?|[^\[\]]+)\.(shape\[0\]|len)$"
_FIRST = r"^(out|[^\[\]]+)\[0\]\."
_LATER = r"^out\[[1-9]"
_SAMPLE = 64  # distinct calls of a function that suggest hypotheses
_MOSTLY = 0.75  # of which so many show the equality
_TELLING = 4  # a single size below this is often the size of something else
_INPUTS = 3  # inputs that one result is compared with
_SUBJECT = ("function", "result", "given", "program")
_CALL = ("proc", "args", "pfn", "circ", "seq", "step", "site", "calls")


@register
class InputOutput(Relation):
    """`fn(…)` returns something whose `result` feature equals the `given` feature of its arguments."""

    name: ClassVar[str] = "input_output"
    code: ClassVar[str] = "PR106"
    narrowing: ClassVar[frozenset[str]] = frozenset({"program"})
    upstream: ClassVar[int] = 2
    reads: ClassVar[Reads] = "calls"

    folds: ClassVar[Mapping[str, Fold]] = {"n": "sum"}

    def survey(self, trace: Trace) -> pl.DataFrame:
        """How often each result was compared with an input, by the value that both had ("" where they differ): `n`."""
        calls, results, given = _tables(trace)
        few = calls.sort("proc", "seq").group_by("run", "function", "program", maintain_order=True).head(_SAMPLE)
        both = (
            few.join(results, on="ret")
            .join(given, on=["args", "sort"])
            .with_columns(pl.when(pl.col("out") == pl.col("in")).then("out").otherwise(pl.lit("")).alias("value"))
        )
        # Of a square tensor, nobody knows which side is the one.
        # What a parallel library keeps of a tensor depends on the mesh.
        kept = (
            (pl.col("world") == 1)
            | pl.col("function").str.starts_with("__main__.")
            | pl.col("given").str.ends_with(".len")
        )
        both = both.filter(kept & ~pl.col("twice") & ~pl.col("twice_right"))
        both = both.filter(~(pl.col("given").str.contains(_FIRST) & pl.col("result").str.contains(_LATER)))
        keys = ("function", "own", "result", "given", "sort", "value")
        return self.merge([both.group_by(keys).agg(pl.len().cast(pl.Int64).alias("n"))])

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        if survey.is_empty():
            return []
        same = pl.col("value") != ""
        pairs = survey.group_by("function", "own", "result", "given", "sort").agg(
            (pl.col("n").filter(same).sum() / pl.col("n").sum()).alias("share"),
            pl.col("value").filter(same).n_unique().alias("values"),
            pl.col("value").cast(pl.Int64, strict=False).filter(same).max().alias("one"),
        )
        leading = pl.all_horizontal(pl.col("result", "given").str.contains(_LEADING))
        # As many rows as samples, seen at two sizes, is so by intent also in another program; that a tensor keeps
        # its first dimension may be a matter of how the program is set up.
        sized = (pl.col("values").max() >= 2) | (pl.col("one").n_unique() >= 2)
        pairs = (
            pairs.with_columns(sized.over("function", "result", "given").alias("sized"))
            .with_columns(
                pl.when(
                    leading
                    & pl.col("given").str.ends_with(".len")
                    & pl.col("sized")
                    & ~pl.col("function").str.starts_with("__main__.")
                )
                .then(pl.lit(""))
                .otherwise("own")
                .alias("program")
            )
            .group_by(*_SUBJECT)
            .agg(
                pl.col("share").min(),
                pl.col("values").max(),
                pl.col("one").max(),
                pl.col("one").n_unique().alias("ones"),
            )
        )
        sizes = (pl.col("values") >= 2) | (pl.col("ones") >= 2) | (leading & (pl.col("one") >= _TELLING))
        pairs = (
            pairs.filter((pl.col("share") >= _MOSTLY) & sizes)
            .sort("function", "program", "result", "given")
            .group_by("function", "program", "result", maintain_order=True)
            .head(_INPUTS)
        )
        rows = pairs.select(_SUBJECT).iter_rows(named=True)
        return [
            Hypothesis.of(
                self.name,
                fn=r["function"],
                result=r["result"],
                given=r["given"],
                **({"program": r["program"]} if r["program"] else {}),
            )
            for r in rows
        ]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        calls, results, given = _tables(trace)
        wanted = table(hypotheses, "fn", *_SUBJECT[1:]).rename({"fn": "function"})
        rows = (
            wanted.join(calls, on="function", suffix="_")
            .filter((pl.col("program") == "") | (pl.col("program") == pl.col("own")))
            .join(results.drop("sort", "twice"), on=["ret", "result"])
            .join(given.drop("sort", "twice"), on=["args", "given"])
            # A list of lists is not a list of tensors, even where it is as long.
            .with_columns(pl.col("given").str.replace(r"\.len$", "[0].type").alias("item"))
            .join(_item_types(trace), on=["args", "item"], how="left")
            .with_columns((pl.col("out") == pl.col("in")).alias("passed"))
        )
        # Equal outcomes of one kind of call are one example; a failing one keeps its sizes.
        shown = [pl.when(~pl.col("passed")).then(c).alias(f"_{c}") for c in ("out", "in")]
        codes = rows["fn"].unique().to_list()
        frame, names = describe(
            trace, rows.select("hyp", "passed", "items", *shown, "function", "program", *_CALL), codes
        )
        anchored = pl.col("function").map_elements(is_library, return_dtype=pl.Boolean) & (
            pl.col("program") == ""
        )
        frame = frame.with_columns(pl.when(~anchored).then("family").alias("family")).drop(
            "function", "program"
        )
        fields = ("items", *names, "phase", "grad", "autocast", "outer", "parent", "family")
        return Examples(frame.sort("hyp", "proc", "seq"), fields, ("items", "family"))

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        return frozenset({hypothesis.text("fn")})

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        return frozenset((hypothesis.text("fn"), hypothesis.text(side)) for side in ("result", "given"))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(functions=frozenset({hypothesis.text("fn")}))

    def say(self, hypothesis: Hypothesis) -> str:
        result, given = _words(hypothesis.text("result")), _words(hypothesis.text("given"))
        return f"{result} that {hypothesis['fn']} returns equals {given}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        name = hypothesis.text("fn")
        result, given = hypothesis.text("result"), hypothesis.text("given")
        item = result[3:].rpartition(".")[0].strip("[]'") or "result"
        change = "the cast" if result.endswith("dtype") else "samples were merged, dropped or repeated"
        return Detail(
            expected=f"{_words(result)} of {short(name)} equals {_words(given)}, here {example.get('_in')}",
            seen=f"{_words(result)} is {example.get('_out')}",
            function=name,
            advice=f"look at how {short(name)} makes the {item} shape: {change}",
        )


def _words(feature: str) -> str:
    """`out['input_ids'].shape[0]` → "shape[0] of the returned input_ids"; `2.len` → "the length of argument 2"."""
    path, _, attribute = feature.rpartition(".")
    what = {"len": "the length", "value": "the number", "dtype": "the dtype"}.get(attribute, attribute)
    if path.startswith("out"):
        item = path[3:].strip("[]'")
        return f"{what} of the returned {item}" if item else f"{what} of the result"
    return f"{what} of argument {path}"


def _tables(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Distinct calls of the user's functions; features of results (ret, result, out) and of arguments (args, given, in)."""
    return cached(trace, "input_output", lambda: _build(trace))


def _item_types(trace: Trace) -> pl.DataFrame:
    """What the lists among the arguments hold: args, item (`1[0].type`), items."""
    return (
        features_of(trace)
        .filter(pl.col("name").str.contains(r"^[^\[\]]+\[0\]\.type$"))
        .select(pl.col("code").alias("args"), pl.col("name").alias("item"), pl.col("value").alias("items"))
    )


def _build(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    own = texts([n if n and not n.startswith("torch.") else None for n in trace.functions], "fn", "function")
    calls = (
        distinct_of(trace)
        .join(own.drop_nulls(), on="fn")
        .join(programs_of(trace).select("proc", pl.col("program").alias("own")), on="proc")
        .join(trace.procs.select("proc", "run", "world"), on="proc")
    )
    calls = calls.with_columns(pl.col("own").alias("program"))
    dtype = pl.col("name").str.ends_with(".dtype")
    useful = (dtype & pl.col("value").str.contains(FLOATING)) | (~dtype & (pl.col("kind") == "i"))
    features = (
        features_of(trace)
        .filter(useful)
        .with_columns(pl.when(dtype).then(pl.lit("dtype")).otherwise(pl.lit("size")).alias("sort"))
    )
    path = pl.col("name").str.replace(r"\.[^.]+$", "")
    features = features.with_columns((pl.len().over("code", path, "value") > 1).alias("twice"))
    results = features.filter(pl.col("name").str.contains(_RESULT)).select(
        pl.col("code").alias("ret"),
        pl.col("name").alias("result"),
        pl.col("value").alias("out"),
        "sort",
        "twice",
    )
    given = (
        features.filter(pl.col("name").str.contains(_GIVEN))
        .filter(~pl.col("name").str.ends_with(".value") | (pl.col("value").cast(pl.Int64, strict=False) >= 2))
        .select(
            pl.col("code").alias("args"),
            pl.col("name").alias("given"),
            pl.col("value").alias("in"),
            "sort",
            "twice",
        )
    )
    return (
        calls,
        results.join(calls.select("ret").unique(), on="ret", how="semi"),
        given.join(calls.select("args").unique(), on="args", how="semi"),
    )
