"""Conditions and preconditions: when a rule applies (TrainCheck §3.5–3.6).

An example is a row whose columns are *fields*. A field holds one text, the value that all records of the example
share, and is null where they do not share one or do not have it. `UNTOLD` stands for one that a call had and that was not recorded: no condition
on its value, or on that there is none, is met. For examples of several records a second,
boolean column `<field>~` says whether the records agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
import polars as pl

UNTOLD: Final = "(not recorded)"
BEYOND: Final = "_beyond"  # column of texts: fields that a record had and for which there was no column, each in bars (`barred`)
AGREE: Final = "~"  # suffix of the column that says whether the records of an example agree on a field


FAMILY: Final = "family"  # the field that holds `Trace.families`
# Where in a run something is, in words: `first` of `contain` and `sequence`.
_PLACES: Final = {"first": "it is of the first step or comes before it", "later": "it comes after the first step", "several": "it spans several steps"}
_MAX_VALUE_CHARS: Final = 240  # of a value that is kept as an example


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

        A field that is not a column of this frame was not set in any record, unless `BEYOND` names it: only "is not set" holds of it.
        """
        name = self.field + AGREE if self.kind in (Kind.CONSISTENT, Kind.UNEQUAL) else self.field
        if name not in columns:
            unset = self.kind is Kind.CONSTANT and self.value is None
            if unset and BEYOND in columns:
                return ~pl.col(BEYOND).str.contains(barred(name), literal=True).fill_null(value=False)
            return pl.lit(value=unset)
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

    def met(self, fields: Mapping[str, str]) -> bool:
        """Whether one example satisfies it, given what is set of its fields (`clip`ped) and `<field>~` as true or false."""
        match self.kind:
            case Kind.CONSTANT:
                return fields.get(self.field) == (None if self.value is None else clip(self.value))
            case Kind.CONSISTENT:
                return fields.get(self.field + AGREE) == "true"
            case Kind.UNEQUAL:
                return fields.get(self.field + AGREE) == "false"
            case Kind.EXIST:
                return self.field in fields

    @property
    def said(self) -> bool:
        """Whether the condition is worth a reader's time: that something is not there seldom is."""
        return self.kind is not Kind.CONSTANT or self.value is not None

    def say(self) -> str:
        match self.kind:
            case Kind.CONSTANT:
                if self.field == FAMILY and self.value:
                    return f"the program trains {_say_family(self.value)}"
                if self.field == "first" and self.value in _PLACES:
                    return _PLACES[self.value]
                shown = "not set" if self.value is None else self.value or "none"
                return f"{self.field} is {shown}"
            case Kind.CONSISTENT:
                return f"{self.field} is the same"
            case Kind.UNEQUAL:
                return f"{self.field} differs"
            case Kind.EXIST:
                return f"{self.field} is known"


class Precondition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A disjunction of conjunctions; the rule applies to an example that satisfies one of them, or none if inverted."""

    any_of: tuple[tuple[Condition, ...], ...]
    inverted: bool = False  # of rules that others' tools found; ours are never inverted

    def holds(self, columns: frozenset[str]) -> pl.Expr:
        clauses = [
            pl.all_horizontal([c.holds(columns) for c in clause]) if clause else pl.lit(value=True)
            for clause in self.any_of
        ]
        met = pl.any_horizontal(clauses) if clauses else pl.lit(value=False)
        return ~met if self.inverted else met

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(c.field for clause in self.any_of for c in clause)

    def covers(self, other: Precondition) -> bool:
        """Whether it applies wherever the other does, as far as that can be told without examples."""
        mine = [frozenset(clause) for clause in self.any_of]
        return all(any(clause <= frozenset(theirs) for clause in mine) for theirs in other.any_of)

    @property
    def unconditional(self) -> bool:
        return not self.inverted and any(not clause for clause in self.any_of)

    def say(self) -> str:
        """The conditions in English. Fields that must merely be absent are left out; `proctor explain` lists them."""
        clauses = [" and ".join(c.say() for c in clause if c.said) for clause in self.any_of]
        if self.inverted:
            return f"not ({'; or '.join(clauses)})" if all(clauses) else "never"
        return "; or ".join(clauses) if all(clauses) else "always"

    def absent(self) -> list[str]:
        """Fields that must not be set for the rule to apply."""
        return sorted({c.field for clause in self.any_of for c in clause if not c.said})


def barred(*fields: str) -> str:
    """Fields as `BEYOND` holds them."""
    return "|" + "|".join(fields) + "|" if fields else ""


def clip(value: str) -> str:
    """A value short enough to keep; the end of a long one becomes a digest, so that equal ones stay equal."""
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    return f"{value[:_MAX_VALUE_CHARS]}…{hashlib.sha256(value.encode(errors='replace')).hexdigest()[:8]}"


def _say_family(family: str) -> str:
    """`__main__.Net/torch.nn.Conv2d __main__.Net/torch.nn.Linear` as `Net (Conv2d, Linear)`."""
    owners: dict[str, list[str]] = {}
    for word in family.split():
        model, _, module = word.partition("/")
        owners.setdefault(model.rpartition(".")[2], []).append(module.rpartition(".")[2])
    return ", ".join(f"{model} ({', '.join(m for m in modules if m)})" for model, modules in owners.items())


ALWAYS: Final = Precondition(any_of=((),))
