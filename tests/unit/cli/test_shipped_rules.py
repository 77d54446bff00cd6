"""The packs that Proctor ships say to strangers what holds in any program, and no more loudly than that is certain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proctor.invariants import pack
from proctor.invariants.invariant import PAGE_RUNS, Invariant, Severity, Standing, Tier
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import Relation, registry


def shipped() -> Iterator[tuple[Relation, Invariant]]:
    known = registry()
    for path in pack.shipped():
        for rule in read_pack(path).invariants:
            yield known[rule.relation], rule


def test_no_habit_of_the_learned_programs_is_shipped() -> None:
    rules = list(shipped())
    assert len(rules) > 100
    assert [rule.text for relation, rule in rules if relation.standing_of(rule.hypothesis) is Standing.HABIT] == []


def test_what_a_program_may_do_on_purpose_is_no_error() -> None:
    choices = [rule for relation, rule in shipped() if relation.standing_of(rule.hypothesis) is Standing.CHOICE]
    assert choices
    assert [rule.text for rule in choices if rule.severity.level > Severity.WARNING.level] == []


def test_who_pages_is_replicas_that_part_or_has_a_record() -> None:
    pages = [(relation, rule) for relation, rule in shipped() if relation.tier(rule) is Tier.PAGE]
    assert any("identical" in rule.text for _, rule in pages)
    for relation, rule in pages:
        proven = rule.record is not None and rule.record.tested >= PAGE_RUNS and rule.record.clean
        assert proven or relation.standing_of(rule.hypothesis) is Standing.REPLICAS, rule.text
    for relation, rule in shipped():
        assert rule.tier is relation.tier(rule), rule.text


@pytest.mark.parametrize("relation", registry().values(), ids=lambda r: r.name)
def test_every_relation_says_why_its_rules_hold(relation: Relation) -> None:
    assert relation.standing in Standing
