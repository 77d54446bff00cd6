"""Which rules say nothing that another one does not say? They go, so that packs stay small and one bug is one alarm.

1. *Implied*: another rule of the relation applies wherever this one does (`Precondition.covers`) and fails on every
   record on which this one fails (`Relation.implies`). Nothing is lost by dropping it.
2. *Coincident*: another rule of the relation with the same precondition blames the same function, differs in one
   parameter, and passed and failed on exactly the same records, failures among them. Agreement on passing records
   alone is no evidence: on healthy runs most rules pass always.

Source: the idea of suppressing implied invariants is Daikon's (Ernst et al. 2007, §4.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from proctor.invariants.invariant import Hypothesis, Invariant
from proctor.invariants.relations import Examples, Relation

MIN_FAILED = 3  # failing records that two rules must share to be one
MAX_PAIRS = 4_000_000  # of one relation that are compared with a relation's own `implies`


@dataclass(frozen=True)
class Redundant:
    """A rule that goes, the one that stays for it, and why in one word."""

    rule: str
    kept: str
    why: str  # implied, coincident


def without_implied(
    rules: Sequence[Invariant], relations: Mapping[str, Relation]
) -> tuple[list[Invariant], list[Redundant]]:
    """Rules that no other rule implies, in their order, and those that go. Of equal rules the first stays."""
    gone: dict[int, Redundant] = {}
    for relation, members in _buckets(rules, relations):
        for b in members:
            for a in members:
                if a != b and a not in gone and _implied(rules[b], by=rules[a], relation=relation):
                    if _implied(rules[a], by=rules[b], relation=relation) and _rank(rules[b]) < _rank(rules[a]):
                        continue  # they say the same, and b is the better one
                    gone[b] = Redundant(rules[b].id, rules[a].id, "implied")
                    break
    return [r for i, r in enumerate(rules) if i not in gone], list(gone.values())


def without_coincident(
    rules: Sequence[Invariant], hypotheses: Sequence[Hypothesis], examples: Examples
) -> tuple[list[Invariant], list[Redundant]]:
    """Rules of one relation that differ in what they passed and failed on, and those that go.

    Args:
        rules: of one relation, with their evidence, which says whom they blame.
        hypotheses: what the examples are indexed by.
        examples: those that the rules were learned from.
    """
    prints = _prints(examples)
    index = {h: i for i, h in enumerate(hypotheses)}
    alike: dict[object, list[Invariant]] = defaultdict(list)
    for rule in rules:
        seen = prints.get(index.get(rule.hypothesis, -1))
        blamed = frozenset(example.where for example in rule.evidence.failing)
        if seen is not None and seen[2] >= MIN_FAILED and blamed:
            names = tuple(name for name, _ in rule.hypothesis.params)
            alike[rule.precondition, blamed, names, seen].append(rule)
    gone: dict[str, Redundant] = {}
    for members in alike.values():
        kept: list[Invariant] = []
        for rule in sorted(members, key=_rank):
            twin = next((k for k in kept if _differ(k.hypothesis, rule.hypothesis) == 1), None)
            if twin is None:
                kept.append(rule)
            else:
                gone[rule.id] = Redundant(rule.id, twin.id, "coincident")
    return [r for r in rules if r.id not in gone], list(gone.values())


def _buckets(
    rules: Sequence[Invariant], relations: Mapping[str, Relation]
) -> list[tuple[Relation, list[int]]]:
    """Rules that may imply each other: those equal but for what narrows, unless the relation knows better."""
    found: dict[object, list[int]] = defaultdict(list)
    for i, rule in enumerate(rules):
        relation = relations.get(rule.relation)
        if relation is None:
            continue
        own = type(relation).implies is not Relation.implies
        key = () if own else tuple((k, v) for k, v in rule.hypothesis.params if k not in relation.narrowing and v not in (None, ""))
        found[rule.relation, own, key].append(i)
    return [
        (relations[rules[members[0]].relation], members)
        for members in found.values()
        if len(members) > 1 and len(members) ** 2 <= MAX_PAIRS
    ]


def _implied(rule: Invariant, *, by: Invariant, relation: Relation) -> bool:
    return by.precondition.covers(rule.precondition) and (
        rule.hypothesis == by.hypothesis or relation.implies(by.hypothesis, rule.hypothesis)
    )


def _rank(rule: Invariant) -> tuple[int, int, int, str]:
    """The most general and readable first."""
    return -rule.support.programs, len(rule.hypothesis.params), len(rule.text), rule.id


def _prints(examples: Examples) -> dict[int, tuple[int, int, int]]:
    """By hypothesis: digests of the records it passed and failed on, and how many failed."""
    frame = examples.frame.filter(pl.col("passed").is_not_null())
    where = [c for c in ("proc", "step", "seq") if c in frame.columns]
    marks = frame.select("hyp", "passed", pl.struct(where).hash().alias("_h")).group_by("hyp").agg(
        pl.col("_h").filter(pl.col("passed")).sum().alias("good"),
        pl.col("_h").filter(~pl.col("passed")).sum().alias("bad"),
        (~pl.col("passed")).sum().alias("n"),
    )
    return {hyp: (good, bad, n) for hyp, good, bad, n in marks.iter_rows()}


def _differ(a: Hypothesis, b: Hypothesis) -> int:
    left, right = dict(a.params), dict(b.params)
    return sum(left[k] != right[k] for k in left)
