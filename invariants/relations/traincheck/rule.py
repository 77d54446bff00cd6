"""What the families of imported rules share: the precondition in the hypothesis, and frames of examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec
import polars as pl

from proctor.invariants.condition import ALWAYS, Precondition
from proctor.invariants.invariant import Hypothesis, Param
from proctor.invariants.relations import Examples, Needs, Relation
from proctor.invariants.relations.traincheck.fields import columns
from proctor.invariants.relations.traincheck.records import Records, records
from proctor.invariants.trace import Trace

SCHEMA: Final = {
    "hyp": pl.UInt32,
    "passed": pl.Boolean,
    "proc": pl.UInt16,
    "step": pl.Int32,
    "seq": pl.UInt32,
    "site": pl.UInt32,
}
WHEN: Final = "when"  # parameter of a hypothesis: its precondition, which decides which records it looks at


class TrainCheckRule(Relation):
    """A family of TrainCheck's rules; it proposes none."""

    group: ClassVar[str]  # TrainCheck's name for the records that its precondition speaks of

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return []

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        """Examples in a run that was imported; none in others."""
        seen = records(trace)
        parts = self.judge(seen, trace, hypotheses) if seen is not None else []
        parts = [p for p in parts if p.height]
        frame = pl.concat(parts, how="diagonal_relaxed") if parts else pl.DataFrame(schema=SCHEMA)
        return Examples(frame, fields=tuple(c for c in frame.columns if c not in SCHEMA and not c.startswith("_")))

    def judge(self, seen: Records, trace: Trace, hypotheses: Sequence[Hypothesis]) -> list[pl.DataFrame]:
        """Frames with the columns of `SCHEMA` and of the fields of each hypothesis."""
        raise NotImplementedError

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs()


def stored(precondition: Precondition) -> str:
    """A precondition as the parameter of a hypothesis."""
    return msgspec.json.encode(precondition).decode()


def precondition(hypothesis: Hypothesis) -> Precondition:
    """The precondition in a hypothesis; it always applies where there is none, never where it is damaged."""
    text = hypothesis.text(WHEN)
    if not text:
        return ALWAYS
    try:
        return msgspec.json.decode(text, type=Precondition)
    except msgspec.MsgspecError:
        return Precondition(any_of=())


def fields_of(hypotheses: Sequence[Hypothesis]) -> list[str]:
    """Fields that any of these preconditions speaks of."""
    return sorted({f for h in hypotheses for f in precondition(h).fields})


def with_fields(seen: Records, calls: pl.DataFrame, hypotheses: Sequence[Hypothesis]) -> pl.DataFrame:
    """Calls or states, with the fields that these hypotheses speak of."""
    return pl.concat([calls, columns(seen, calls, fields_of(hypotheses))], how="horizontal")


def met(rows: pl.DataFrame, hypothesis: Hypothesis) -> pl.DataFrame:
    """The rows on which the precondition holds."""
    return rows.filter(precondition(hypothesis).holds(frozenset(rows.columns)))


def example_rows(hyp: int, hypothesis: Hypothesis, rows: pl.DataFrame, passed: Any) -> pl.DataFrame:
    """One example a row: columns of `SCHEMA`, and the fields that the precondition of this hypothesis speaks of."""
    fields = [c for f in sorted(precondition(hypothesis).fields) for c in (f, f"{f}~") if c in rows.columns]
    own = [c for c in rows.columns if c.startswith("_")]
    return rows.select(
        pl.lit(hyp, dtype=pl.UInt32).alias("hyp"),
        pl.Series("passed", passed, dtype=pl.Boolean),
        "proc",
        "step",
        "seq",
        pl.lit(0, dtype=pl.UInt32).alias("site"),
        *fields,
        *own,
    )


def decoded(value: Param) -> Any:
    """A parameter that holds JSON; null where it is damaged."""
    try:
        return json.loads(str(value))
    except (ValueError, RecursionError):
        return None


def short(name: str) -> str:
    """`torch.optim.optimizer.Optimizer.step` as `Optimizer.step`."""
    parts = name.split(".")
    first = next((i for i, p in enumerate(parts) if p[:1].isupper()), max(len(parts) - 2, 0))
    return ".".join(parts[first:])
