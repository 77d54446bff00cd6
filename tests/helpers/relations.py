"""Relations simple enough to be right at sight, for tests of what is built on relations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from proctor.invariants.condition import ALWAYS, Precondition
from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Standing, Support, invariant_id
from proctor.invariants.relations import Detail, Examples, Needs, Relation
from proctor.invariants.trace import Trace

_SCHEMA = {
    "hyp": pl.UInt32,
    "passed": pl.Boolean,
    "proc": pl.UInt16,
    "step": pl.Int32,
    "seq": pl.UInt32,
    "site": pl.UInt32,
    "phase": pl.String,
}


class Happens(Relation):
    """In every step of a process that calls `then`, `first` is called too."""

    name = "test_happens"
    code = "PR190"
    absence = True
    upstream = 1
    standing = Standing.CONTRADICTION

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return []

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        steps = trace.contexts.select("ctx", "step", "phase")
        calls = trace.calls.join(steps, on="ctx", how="inner").sort("proc", "seq")
        rows = []
        for hyp, h in enumerate(hypotheses):
            first, then = (trace.function_code.get(h.text(k), 0) for k in ("first", "then"))
            for (proc, step), group in calls.group_by("proc", "step", maintain_order=True):
                after = group.filter(pl.col("fn") == then)
                if after.height:
                    seen = bool((group["fn"] == first).any())
                    rows.append((hyp, seen, proc, step, after["seq"][0], after["site"][0], after["phase"][0]))
        return Examples(pl.DataFrame(rows, schema=_SCHEMA, orient="row"), fields=("phase",))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({hypothesis.text("first"), hypothesis.text("then")}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{hypothesis['first']} is called in every step that calls {hypothesis['then']}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=f"{hypothesis.text('first')} before {hypothesis.text('then')}",
            seen=f"{hypothesis.text('first')} never ran before {hypothesis.text('then')}",
            function=hypothesis.text("first"),
            advice="the training loop",
        )


class Finite(Relation):
    """A variable holds no NaN: flag 4 of a state is a failure, flag 16 is unknown."""

    name = "test_finite"
    code = "PR191"
    severity = Severity.CRITICAL
    upstream = 3

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return []

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        steps = trace.contexts.select("ctx", "step", "phase")
        states = trace.states.join(steps, on="ctx", how="inner").join(trace.variables.select("var", "name"), on="var")
        rows = [
            (hyp, None if flags & 16 else not flags & 4, proc, step, seq, 0, phase)
            for hyp, h in enumerate(hypotheses)
            for name, flags, proc, step, seq, phase in states.select(
                "name", "flags", "proc", "step", "seq", "phase"
            ).iter_rows()
            if name == h.text("variable")
        ]
        return Examples(pl.DataFrame(rows, schema=_SCHEMA, orient="row"), fields=("phase",))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(states=frozenset({"data"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{hypothesis['variable']} is finite"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail("every element finite", "NaN in it", variable=hypothesis.text("variable"), module="torch.nn.Linear")


class Broken(Relation):
    """Cannot be evaluated at all."""

    name = "test_broken"
    code = "PR192"

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return []

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        raise ZeroDivisionError("first line\nsecond line")

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs()

    def say(self, hypothesis: Hypothesis) -> str:
        return "nothing"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail("", "")


ALL: dict[str, Relation] = {r.name: r for r in (Happens(), Finite(), Broken())}


def rule(
    relation: str,
    precondition: Precondition = ALWAYS,
    severity: Severity | None = None,
    passed: int = 120,
    **params: str,
) -> Invariant:
    """An invariant of one of these relations."""
    hypothesis = Hypothesis.of(relation, **params)
    known = ALL[relation]
    return Invariant(
        id=invariant_id(hypothesis, precondition),
        hypothesis=hypothesis,
        precondition=precondition,
        support=Support(passed=passed, excluded=0, runs=3, programs=2),
        text=known.say(hypothesis),
        severity=severity or known.severity,
    )
