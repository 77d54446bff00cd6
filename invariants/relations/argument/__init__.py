"""What a function is given keeps its pattern: over calls, across ranks, or wherever one caller calls it.

Catches a collective that lost its group (DeepSpeed 6714), seeds that are equal on ranks that need different ones, an
epoch that `set_epoch` never sees advance, a capacity that differs between ranks, a model left in evaluation mode
when training goes on. Source: TrainCheck §3.2 (APIArg: consistency or distinction over all calls). Differs from it:
what is compared are plain values only, and a pattern that is a choice of the program never leaves its family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations._surveys import Fold
from proctor.invariants.relations.argument.model_modes import MODE_SETTERS
from proctor.invariants.relations.argument.switches import SCRIPT
from proctor.invariants.relations.argument.tables import (
    DROPOUTS,
    GROUP,
    SHARED_BY_RANKS,
    SUBJECT,
    tables,
)
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import (
    ENOUGH,
    circumstances_of,
    is_library,
    programs_of,
    short,
    table,
    weights_of,
)
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

_FIELDS = ("phase", "grad", "autocast", "roots", "class", "world", "weights", "family")
_SOMETIMES = ("passes", "training", "evaluating", "dropping")  # modes of which a precondition may say when they hold
_ADVICE = {
    "passes": "compare the call with the one in the healthy version: an argument was dropped or swapped",
    "same": "look for what changes this argument between calls",
    "ranks_same": "look at how each rank computes this argument: ranks have to agree on it",
    "ranks_distinct": "ranks repeat each other's work: the rank is missing where this argument is computed",
    "never_repeats": "the counter or seed behind this argument does not advance",
    "training": "call model.train() again after an evaluation; dropout and batch norm do not train without it",
    "dropping": "pass training=self.training (its default is True), of attention dropout_p=p if self.training else 0.0, or use a module",
    "evaluating": "call model.eval() before an evaluation; dropout and batch norm still train",
}


@register
class Argument(Relation):
    """Rules on arguments: `mode` is passes, same, ranks_same, ranks_distinct, never_repeats, training, or evaluating."""

    name: ClassVar[str] = "argument"
    code: ClassVar[str] = "PR104"
    upstream: ClassVar[int] = 2
    reads: ClassVar[Reads] = "calls"

    folds: ClassVar[Mapping[str, Fold]] = {"some": "any", "every": "all"}

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        """Subjects by mode, with `some` and `every`: whether any, and whether all decided examples passed."""
        passed = pl.col("passed")
        found = []
        for mode, rows in tables(trace).items():
            value = pl.col("_seen") if mode == "passes" else pl.lit("")
            rows = rows.select(pl.lit(mode).alias("mode"), *SUBJECT, value.alias("value"), "passed")
            found.append(rows.group_by("mode", *SUBJECT, "value").agg(passed.any().alias("some"), passed.all().alias("every")))
        return self.merge(found)

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        if survey.is_empty():
            return []
        # Nothing is known of other arguments that would tell when their pattern holds, so it must always.
        kept = survey.filter(pl.col("mode").is_in(_SOMETIMES) | (pl.col("some") & pl.col("every")))
        found = []
        for row in kept.select("mode", *SUBJECT, "value").iter_rows(named=True):
            row["fn"] = row.pop("function")
            found.append(Hypothesis.of(self.name, **{k: v for k, v in row.items() if v}))
        return sorted(found, key=lambda h: h.params)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        wanted = table(hypotheses, "mode", "fn", *SUBJECT[1:], "value").rename({"fn": "function"})
        frames = []
        for mode, rows in tables(trace).items():
            joined = wanted.filter(pl.col("mode") == mode).join(rows, on=SUBJECT)
            if mode == "passes":
                joined = joined.with_columns((pl.col("_seen") == pl.col("value")).alias("passed"))
            frames.append(joined.select("hyp", "passed", "function", "program", *_ROW))
        frame = pl.concat(frames)
        same = ["hyp", "passed", "function", "program", "proc", "circ", "roots", "class"]
        frame = (
            frame.sort("hyp", "proc", "seq")
            .group_by(same, maintain_order=True)
            .head(ENOUGH)
            .join(circumstances_of(trace).select("circ", "phase", "grad", "autocast"), on="circ", how="left")
            .join(trace.procs.select("proc", pl.col("world").cast(pl.String)), on="proc", how="left")
            .join(weights_of(trace), on="proc", how="left")
            .join(programs_of(trace).select("proc", "family"), on="proc", how="left")
        )
        # A library's function is anchored by its name, unless the rule is about the program that calls it.
        anchored = pl.col("function").map_elements(is_library, return_dtype=pl.Boolean) & (
            pl.col("program") == ""
        )
        by_caller = pl.col("hyp").is_in(
            [i for i, h in enumerate(hypotheses) if h["mode"] == "passes" and is_library(h.text("caller"))]
        )
        frame = frame.with_columns(
            pl.when(~(anchored | by_caller)).then("family").alias("family"),
            # Only the dtype of an argument depends on the precision of the model.
            pl.when(
                pl.col("hyp").is_in(
                    [i for i, h in enumerate(hypotheses) if h.text("feature").endswith("dtype")]
                )
            )
            .then("weights")
            .alias("weights"),
        )
        return Examples(
            frame.drop("function", "program", "circ").sort("hyp", "proc", "seq"),
            _FIELDS,
            ("roots", "weights", "family"),
        )

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        return frozenset() if hypothesis["mode"] == "dropping" else frozenset({hypothesis.text("fn")})  # but whether it is zero

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """A model may be trained in evaluation mode on purpose; dropping in evaluation is nobody's purpose."""
        if hypothesis["mode"] == "dropping":
            return Standing.LAW
        counted = hypothesis["mode"] == "ranks_same" and hypothesis["fn"] in SHARED_BY_RANKS
        return Standing.CHOICE if counted or hypothesis["mode"] == "training" else self.standing

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        if hypothesis["mode"] not in ("training", "evaluating", "dropping"):
            return frozenset({(hypothesis.text("fn"), hypothesis.text("feature"))})
        shares = DROPOUTS if hypothesis["mode"] == "dropping" else ()
        return frozenset({(MODEL_CALL, "0.training"), *((name, path) for name in shares for path in _SHARES)})

    def needs(self, hypothesis: Hypothesis) -> Needs:
        names = {hypothesis.text("fn"), hypothesis.text("caller")} - {"", SCRIPT}
        if hypothesis["mode"] == "training":
            return Needs(frozenset(names | {_frames.UPDATE, *_frames.BACKWARDS, *MODE_SETTERS}), frozenset({"data"}))
        if hypothesis["mode"] == "dropping":
            names |= {MODEL_CALL, *DROPOUTS}
        return Needs(functions=frozenset(names))

    def say(self, hypothesis: Hypothesis) -> str:
        name, what = hypothesis.text("fn"), _words(hypothesis.text("feature"))
        match hypothesis["mode"]:
            case "passes":
                return f"{hypothesis['caller']} calls {name} with {what} {hypothesis['value']}"
            case "same":
                return f"{name} gets the same {what} in all calls of a process"
            case "ranks_same":
                return f"{name} gets the same {what} on all ranks"
            case "ranks_distinct":
                return f"{name} gets a different {what} on each rank"
            case "never_repeats":
                return f"{name} never gets the same {what} twice in a process"
            case "dropping":
                return f"{name} drops nothing inside a model in evaluation mode"
            case "training":
                return "the model is in training mode in the forward before each backward"
        return "the model is in evaluation mode when it runs without gradients"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode, name, seen = hypothesis.text("mode"), hypothesis.text("fn"), example.get("_seen")
        what = _words(hypothesis.text("feature"))
        if mode == "dropping":
            return Detail(expected="nothing is dropped, since the model evaluates", seen=str(seen), function=name, advice=_ADVICE[mode])
        if name == MODEL_CALL:
            model = str(example.get("class") or "model")
            wanted, got = ("training", "evaluation") if mode == "training" else ("evaluation", "training")
            return Detail(
                expected=f"{model} in {wanted} mode",
                seen=f"it ran in {got} mode",
                function=f"{model}.forward",
                module=model,
                advice=_ADVICE[mode],
            )
        by = f" in {hypothesis['caller']}" if mode == "passes" else ""
        expected = {
            "passes": str(hypothesis.get("value")),
            "same": "as in the calls before",
            "ranks_same": "the same on all ranks",
            "ranks_distinct": "different on each rank",
            "never_repeats": "not seen before in this process",
        }[mode]
        return Detail(
            expected=f"{name} {what}{by}: {expected}",
            seen=f"{what} is {seen or 'not given'}",
            function=f"{name} ({what})",
            module=hypothesis.text("caller").replace(SCRIPT, ""),
            advice=f"{_ADVICE[mode]} ({short(name)}{', called by ' + short(hypothesis.text('caller')) if by else ''})",
        )


_SHARES = ("p.value", "1.value", "dropout_p.value", "4.value")  # where functions are given how much they drop
_ROW = ("proc", "circ", "roots", "class", "_seen", "seq", "step", "site")


def _words(feature: str) -> str:
    """`group` → "group argument"; `0.value` → "argument 0"; `0.shape[1]` → "argument 0 shape[1]"."""
    if feature == GROUP:
        return "group argument"
    path, _, attribute = feature.rpartition(".")
    return f"argument {path}" if attribute == "value" else f"argument {path} {attribute}"
