"""Traces in memory and relations over them, importable by a spawned worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Severity, Support
from proctor.invariants.relations import Detail, Examples, Needs, Relation
from proctor.invariants.schema import Name
from proctor.invariants.trace import Process, Trace

NAMES = ["", "step", "zero_grad", "rare", "torch._step", "__main__.Loop._step"]


def trace(calls: Sequence[tuple[int, str, str]], runs: int = 2) -> Trace:
    """A trace of (process, function, phase); process i belongs to run and program i modulo `runs`."""
    processes = [
        Process(
            run=i % runs,
            rank=i // runs,
            world=2,
            pid=i,
            program=f"train{i % runs}.py",
            folder="",
            finished=True,
        )
        for i in range(max(p for p, _, _ in calls) + 1)
    ]
    phases = sorted({phase for _, _, phase in calls})
    context = pl.DataFrame(
        {
            "ctx": pl.Series(range(len(phases)), dtype=pl.UInt32),
            "step": pl.Series([0] * len(phases), dtype=pl.Int32),
            "phase": phases,
        }
    )
    frame = pl.DataFrame(
        {
            "proc": pl.Series([p for p, _, _ in calls], dtype=pl.UInt16),
            "seq": pl.Series(range(1, len(calls) + 1), dtype=pl.UInt32),
            "fn": pl.Series([NAMES.index(f) for _, f, _ in calls], dtype=pl.UInt32),
            "ctx": pl.Series([phases.index(c) for _, _, c in calls], dtype=pl.UInt32),
        }
    )
    texts = {kind: [""] for kind in Name} | {Name.FUNCTION: NAMES}
    states = pl.DataFrame(schema={"proc": pl.UInt16, "ctx": pl.UInt32, "var": pl.UInt32, "meta": pl.UInt32})
    return Trace(processes, [f"run{i}" for i in range(runs)], frame, states, context, texts)


class OnlyCalls(Relation):
    """Each function is the only one that is called: true of the phases in which nothing else is."""

    name = "only"
    code = "PR197"
    severity = Severity.WARNING

    def propose(self, trace: Trace) -> list[Hypothesis]:
        found = [
            Hypothesis.of(self.name, function=NAMES[code]) for code in trace.calls["fn"].unique().to_list()
        ]
        return [*found, *found, Hypothesis.of(self.name, function="absent")]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        calls = trace.calls.join(trace.contexts, on="ctx", how="left")
        frames = [
            calls.select(
                pl.lit(i, dtype=pl.UInt32).alias("hyp"),
                (pl.col("fn") == NAMES.index(h.text("function"))).alias("passed"),
                "proc",
                "phase",
            )
            for i, h in enumerate(hypotheses)
            if h.text("function") in NAMES
        ]
        return Examples(pl.concat(frames), ("phase",))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({hypothesis.text("function")}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{hypothesis['function']} is all that is called"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail("", "")


class Picky(OnlyCalls):
    name = "picky"

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        return hypothesis.text("function") != "step"


class Broken(OnlyCalls):
    name = "broken"

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        raise ZeroDivisionError("first line\nsecond line")


CALLS = [
    *[(p, "step", "train") for p in (0, 1, 2, 3) for _ in range(3)],
    *[(p, "zero_grad", "eval") for p in (0, 2) for _ in range(2)],
    (0, "rare", "init"),
]
