"""Numbers of a training program fit together: a total and its factors, a loss and the share of it that is propagated.

Catches a total number of steps that is computed from the wrong counts (the trainer stops early: transformers 33455), a
loss that is not divided by the number of accumulated microbatches, a schedule made for the steps of all ranks, a scale
that is applied twice. Source: ours; TrainCheck (§5.2) misses transformers 33455, since it looks at no plain numbers.

The formula of a number is what the source of a healthy run says, confirmed by every look that was had at it
(`instrument/probes/numbers.py`); several assignments of a name are alternatives. So no coincidence of two numbers makes
a rule, and a number that the user is free to choose has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Support
from proctor.invariants.relations import Detail, Examples, Needs, Relation, register
from proctor.invariants.relations._surveys import Fold
from proctor.invariants.relations.scalar import formulas
from proctor.invariants.relations.views.calls import cached, is_library, programs_of, short
from proctor.invariants.relations.views.frames import UPDATE
from proctor.invariants.relations.views.losses import LOSSES
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace

# Relative: a loss of one element is float32, and its formula is evaluated in double precision.
_TOLERANCE: Final = 1e-4
_MIN_LOOKS: Final = 3
_PLACE: Final = ("fn", "at", "program")
_SUBJECT: Final = ("fn", "target", "at", "through", "program")


@register
class Scalar(Relation):
    """The number `target` of function `fn`, looked at during calls of `at`, is given by one of `formulas`."""

    name: ClassVar[str] = "scalar"
    code: ClassVar[str] = "PR109"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = 0

    folds: ClassVar[Mapping[str, Fold]] = {"ok": "all", "n": "sum"}

    def survey(self, trace: Trace) -> pl.DataFrame:
        """Formulas of each subject; `ok`: one of those that this shard recorded always held, `n`: looks."""
        seen = _numbers(trace).filter(pl.col("formula") != "").group_by(*_SUBJECT).agg(pl.col("formula").unique().sort())
        rows = []
        for subject in seen.sort(_SUBJECT).iter_rows(named=True):
            texts = subject.pop("formula")
            looks = _looks(trace, subject, _alternatives(texts))
            held = looks["passed"]
            count = int(held.sum() or 0)
            rows += [{**subject, "formula": text, "ok": bool(held.all()) and count > 0, "n": count} for text in texts]
        types = {**dict.fromkeys((*_SUBJECT, "formula"), pl.String), "ok": pl.Boolean, "n": pl.Int64}
        return self.merge([pl.DataFrame(rows, schema=types)])

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        if survey.is_empty():
            return []
        sound = survey.group_by(*_SUBJECT).agg(pl.col("ok").all(), pl.col("n").max(), pl.col("formula").unique().sort())
        sound = sound.filter(pl.col("ok") & (pl.col("n") >= _MIN_LOOKS)).sort(_SUBJECT)
        # The same holds wherever it is looked at; an update is what every run has.
        order = pl.when(pl.col("at") == UPDATE).then(0).otherwise(1)
        sound = sound.sort(order, "at", maintain_order=True).unique(["fn", "target", "through", "program", "formula"], keep="first", maintain_order=True)
        found = []
        for row in sound.sort(_SUBJECT).select(*_SUBJECT, "formula").iter_rows(named=True):
            every = {json.dumps(f, separators=(",", ":")) for f in _alternatives(row.pop("formula"))}
            if every:
                found.append(Hypothesis.of(self.name, formulas=f"[{','.join(sorted(every))}]", **{k: v for k, v in row.items() if v}))
        return found

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        frames = []
        for hyp, hypothesis in enumerate(hypotheses):
            subject = {k: hypothesis.text(k) for k in _SUBJECT}
            looks = _looks(trace, subject, formulas.parse(hypothesis.text("formulas")))
            frames.append(looks.select(pl.lit(hyp, dtype=pl.UInt32).alias("hyp"), *_EXAMPLE))
        frame = pl.concat(frames) if frames else pl.DataFrame(schema={"hyp": pl.UInt32, **_EXAMPLE})
        contexts = trace.contexts.select("ctx", "step", "phase")
        calls = trace.calls.select("proc", "seq", "site")
        frame = frame.join(contexts, on="ctx", how="left", maintain_order="left").drop("ctx")
        frame = frame.join(calls, on=["proc", "seq"], how="left", maintain_order="left")
        frame = frame.with_columns(pl.col("site").fill_null(0))
        return Examples(frame.sort("hyp", "proc", "seq"), ("phase",))

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        """Only what always held is a formula."""
        return support.excluded == 0

    def needs(self, hypothesis: Hypothesis) -> Needs:
        read = {n for f in formulas.parse(hypothesis.text("formulas")) for n in formulas.operands(f)}
        losses = LOSSES if "loss()" in read else frozenset()
        return Needs(functions=frozenset({hypothesis.text("at")}) | losses, values=frozenset({"number"}))

    def say(self, hypothesis: Hypothesis) -> str:
        said = " or ".join(formulas.words(f) for f in formulas.parse(hypothesis.text("formulas")))
        return f"{_called(hypothesis.text('target'))} in {short(hypothesis.text('fn'))} equals {said}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        target, fn = hypothesis.text("target"), hypothesis.text("fn")
        said = " or ".join(formulas.words(f) for f in formulas.parse(hypothesis.text("formulas")))
        return Detail(
            expected=f"{_called(target)} = {said} = {_plain(example.get('_expected'))}",
            seen=f"{_called(target)} is {_plain(example.get('_value'))}",
            function=fn,
            variable=target,
            advice=f"look at how {short(fn)} computes {_called(target)}",
        )


_EXAMPLE: Final = {
    "passed": pl.Boolean,
    "proc": pl.UInt16,
    "seq": pl.UInt32,
    "ctx": pl.UInt32,
    "_value": pl.Float64,
    "_expected": pl.Float64,
}


def _called(target: str) -> str:
    """`backward[0]` → "the argument of backward"."""
    if target == "return":
        return "the result"
    return f"the number given to {target.partition('[')[0]}" if target.startswith(("backward[", "clip_grad_norm_[", "set_epoch[")) else target


def _plain(value: Any) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def _alternatives(texts: Sequence[str]) -> list[formulas.Formula]:
    return list(dict.fromkeys(f for text in texts for f in formulas.parse(text)))


def _numbers(trace: Trace) -> pl.DataFrame:
    """Numbers with the function and the call that they belong to: proc, seq, ctx, fn, target, at, program, number, formula."""
    return cached(trace, "scalar", lambda: _build(trace))


def _build(trace: Trace) -> pl.DataFrame:
    rows = trace.values.filter(pl.col("kind") == int(Value.NUMBER)).select("proc", "seq", "ctx", "place", "meta", "number")
    places = [p.partition(":") for p in trace.places]
    named = pl.DataFrame(
        {
            "place": pl.Series(range(len(places)), dtype=pl.UInt32),
            "fn": pl.Series([p[0] if p[1] else "" for p in places], dtype=pl.String),
            "target": pl.Series([p[2] for p in places], dtype=pl.String),
        }
    )
    known = trace.metas
    facts = ("formula", "through")
    metas = known.select("meta", *(pl.col(c) if c in known.columns else pl.lit(None, dtype=pl.String).alias(c) for c in facts))
    functions = pl.DataFrame(
        {"fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32), "at": pl.Series(trace.functions, dtype=pl.String)}
    )
    calls = trace.calls.select("proc", "seq", "fn").join(functions, on="fn", how="left").drop("fn")
    libraries = {fn: is_library(fn) for fn in set(named["fn"].to_list())}
    own = programs_of(trace).select("proc", "program")
    frame = (
        rows.join(named, on="place", how="left", maintain_order="left")
        .filter(pl.col("fn") != "")
        .join(metas, on="meta", how="left", maintain_order="left")
        .join(calls, on=["proc", "seq"], how="inner", maintain_order="left")
        .join(own, on="proc", how="left", maintain_order="left")
    )
    library = pl.col("fn").replace_strict(libraries, default=False, return_dtype=pl.Boolean)
    # What a library's function calls may be another program's own; the functions of one program are its own all.
    return frame.select(
        "proc", "seq", "ctx", "fn", "target", "at", "number",
        pl.when(library).then(pl.lit("")).otherwise(pl.col("program").fill_null("")).alias("program"),
        pl.when(library).then(pl.col("through").fill_null("")).otherwise(pl.lit("")).alias("through"),
        pl.col("formula").fill_null(""),
    ).unique(["proc", "seq", "fn", "target"], keep="last", maintain_order=True)  # fmt: skip


def _places(trace: Trace) -> dict[tuple[str, ...], pl.DataFrame]:
    """`_numbers` by function, call looked at, and program."""
    return cached(trace, "scalar places", lambda: _numbers(trace).partition_by(_PLACE, as_dict=True))


def _looks(trace: Trace, subject: Mapping[str, str], alternatives: Sequence[formulas.Formula]) -> pl.DataFrame:
    """Every look at a subject: proc, seq, ctx, _value, _expected, and `passed`, null where a number is missing."""
    part = _places(trace).get(tuple(subject[k] for k in _PLACE), _numbers(trace).clear())
    mine = (pl.col("target") == subject["target"]) & (pl.col("through") == subject["through"])
    targets = part.filter(mine).select("proc", "seq", "ctx", pl.col("number").alias("_value"))
    columns: dict[str, formulas.Column] = {}
    for name in sorted({n for f in alternatives for n in formulas.operands(f)}):
        values = part.filter(pl.col("target") == name).select("proc", "seq", "number")
        joined = targets.select("proc", "seq").join(values, on=["proc", "seq"], how="left", maintain_order="left")
        columns[name] = joined["number"].fill_null(np.nan).to_numpy().astype(np.float64)
    seen = targets["_value"].to_numpy().astype(np.float64)
    holds, fails = np.zeros(len(seen), dtype=bool), np.zeros(len(seen), dtype=bool)
    known = np.ones(len(seen), dtype=bool)
    expected = np.full(len(seen), np.nan)
    for formula in alternatives:
        value = np.broadcast_to(np.asarray(formulas.evaluate(formula, columns), dtype=np.float64), seen.shape)
        same = np.isclose(value, seen, rtol=_TOLERANCE, atol=1e-12) & ~_integers_differ(value, seen)
        holds |= same
        known &= ~np.isnan(value)
        expected = np.where(np.isnan(expected), value, expected)
    fails = ~holds & known & ~np.isnan(seen) & (len(alternatives) > 0)
    passed = pl.Series("passed", np.where(holds, 1, np.where(fails, 0, -1)), dtype=pl.Int8)
    verdict = pl.when(passed == 1).then(pl.lit(value=True)).when(passed == 0).then(pl.lit(value=False))
    return targets.with_columns(verdict.alias("passed"), pl.Series("_expected", expected))


def _integers_differ(one: Any, other: Any) -> Any:
    """Whole numbers are equal or not: of large ones the tolerance would forgive a few."""
    with np.errstate(invalid="ignore"):
        return (one == np.rint(one)) & (other == np.rint(other)) & (one != other)


