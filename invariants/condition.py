"""Conditions and preconditions: when a rule applies (TrainCheck §3.5–3.6).

An example is a row whose columns are *fields*. A field holds one text, the value that all records of the example
share, and is null where they do not share one or do not have it. For examples of several records a second,
boolean column `<field>~` says whether the records agree.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec
import polars as pl

AGREE: Final = "~"  # suffix of the column that says whether the records of an example agree on a field


FAMILY: Final = "family"  # the field that holds `Trace.families`


class Kind(StrEnum):
    CONSTANT = "constant"  # the same in every record, and equal to `value`
    CONSISTENT = "consistent"  # the same in every record
    UNEQUAL = "unequal"  # differs between records
    EXIST = "exist"  # present in every record


class Condition(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """One predicate on one field of an example."""

    field: str
    kind: Kind
    value: str | None = None

    def holds(self, columns: frozenset[str]) -> pl.Expr:
        """Boolean expression over an examples frame.

        A field that is not a column of this frame was not set in any record: only "is not set" holds of it.
        """
        name = self.field + AGREE if self.kind in (Kind.CONSISTENT, Kind.UNEQUAL) else self.field
        if name not in columns:
            return pl.lit(value=self.kind is Kind.CONSTANT and self.value is None)
        column = pl.col(name)
        match self.kind:
            case Kind.CONSTANT:
                return column.cast(pl.String).eq_missing(pl.lit(self.value))
            case Kind.CONSISTENT:
                return column.fill_null(value=False)
            case Kind.UNEQUAL:
                return ~column.fill_null(value=True)
            case Kind.EXIST:
                return column.is_not_null()

    @property
    def said(self) -> bool:
        """Whether the condition is worth a reader's time: that something is not there seldom is."""
        return self.kind is not Kind.CONSTANT or self.value is not None

    def say(self) -> str:
        match self.kind:
            case Kind.CONSTANT:
                if self.field == FAMILY and self.value:
                    return f"the program trains {_say_family(self.value)}"
                shown = "not set" if self.value is None else self.value or "none"
                return f"{self.field} is {shown}"
            case Kind.CONSISTENT:
                return f"{self.field} is the same"
            case Kind.UNEQUAL:
                return f"{self.field} differs"
            case Kind.EXIST:
                return f"{self.field} is known"


class Precondition(msgspec.Struct, frozen=True):
    """A disjunction of conjunctions; the rule applies to an example that satisfies one of them."""

    any_of: tuple[tuple[Condition, ...], ...]

    def holds(self, columns: frozenset[str]) -> pl.Expr:
        clauses = [
            pl.all_horizontal([c.holds(columns) for c in clause]) if clause else pl.lit(value=True)
            for clause in self.any_of
        ]
        return pl.any_horizontal(clauses) if clauses else pl.lit(value=False)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(c.field for clause in self.any_of for c in clause)

    @property
    def unconditional(self) -> bool:
        return any(not clause for clause in self.any_of)

    def say(self) -> str:
        """The conditions in English. Fields that must merely be absent are left out; `proctor explain` lists them."""
        clauses = [" and ".join(c.say() for c in clause if c.said) for clause in self.any_of]
        return "; or ".join(clauses) if all(clauses) else "always"

    def absent(self) -> list[str]:
        """Fields that must not be set for the rule to apply."""
        return sorted({c.field for clause in self.any_of for c in clause if not c.said})


def _say_family(family: str) -> str:
    """`__main__.Net/torch.nn.Conv2d __main__.Net/torch.nn.Linear` as `Net (Conv2d, Linear)`."""
    owners: dict[str, list[str]] = {}
    for word in family.split():
        model, _, module = word.partition("/")
        owners.setdefault(model.rpartition(".")[2], []).append(module.rpartition(".")[2])
    return ", ".join(f"{model} ({', '.join(m for m in modules if m)})" for model, modules in owners.items())


ALWAYS: Final = Precondition(any_of=((),))
