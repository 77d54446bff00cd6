"""What is wrong with a pack.

Problems make the exit code 1. Warnings are what a pack had better not have: rules whose false alarms were never
measured, rules of one program that apply everywhere, rules that another one implies, suppressions that have ended;
with --strict they count as problems.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Pack
    from proctor.invariants.relations import Relation

_LISTED: Final = 10  # warnings of one kind


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="PACK", nargs="+")
    parser.add_argument("--strict", action="store_true", help="warnings are problems")


def run(args: argparse.Namespace) -> int:
    """Print a line a problem; 1 when there is any."""
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import registry
    from proctor.verify import wording

    known = registry()
    bad = 0
    for path in map(Path, args.files):
        pack = read_pack(path)
        problems, warnings = list(_problems(pack, known)), list(_warnings(pack, known, date.today()))
        for problem in problems:
            print(f"{wording.clean(path)}: {wording.clean(problem)}")
        for warning in warnings:
            print(f"{wording.clean(path)}: {'' if args.strict else 'warning: '}{wording.clean(warning)}")
        bad += len(problems) + (len(warnings) if args.strict else 0)
        if not problems and not (args.strict and warnings):
            also = f", {wording.count(len(warnings), 'warning')}" if warnings else ""
            print(f"{wording.clean(path)}: {wording.count(len(pack.invariants), 'rule')}, no problem{also}")
    return 1 if bad else 0


def _problems(pack: Pack, known: Mapping[str, Relation]) -> Iterator[str]:
    from proctor.invariants.fit import parse_requirement
    from proctor.invariants.invariant import invariant_id
    from proctor.invariants.private import libraries_of, private_name

    libraries = libraries_of({**pack.requires, **pack.provenance.libraries})
    if not pack.invariants:
        yield "no rule in it: every check with it is inconclusive"
    for repeated, n in Counter(rule.id for rule in pack.invariants).items():
        if n > 1:
            yield f"rule {repeated} occurs {n} times"
    for name, versions in pack.requires.items():
        try:
            whole = parse_requirement(f"{name}{versions}") == (name, versions)
        except ValueError:
            whole = False
        if not whole:
            yield f"$.requires: {name}{versions!r} is no requirement such as torch>=2.6,<3"
    for i, rule in enumerate(pack.invariants):
        where = f"$.invariants[{i}] ({rule.id})"
        relation = known.get(rule.relation)
        if relation is None:
            yield f"{where}: unknown relation {rule.relation!r}; the rule would be skipped"
        else:
            try:
                relation.say(rule.hypothesis)
                relation.needs(rule.hypothesis)
            except Exception as error:  # noqa: BLE001  a malformed rule is a finding, whatever it raises
                yield f"{where}: parameters do not fit the relation ({type(error).__name__}: {error})"
        if rule.id != invariant_id(rule.hypothesis, rule.precondition):
            yield f"{where}: the id is not that of this rule; was it edited by hand?"
        if private := private_name(rule.hypothesis, rule.precondition, libraries):
            yield f"{where}: it speaks of {private}, a private name of a library"
        if not rule.precondition.any_of:
            yield f"{where}: the precondition is empty, so the rule never applies"
        if rule.support.passed <= 0:
            yield f"{where}: no example supports it"
        if not rule.text.strip():
            yield f"{where}: no text"
        if rule.tier == "page" and relation is not None and relation.tier(rule) != "page":
            yield f"{where}: it says that it may page, and has not the evidence for that; it is told as a ticket"


def _warnings(pack: Pack, known: Mapping[str, Relation], today: date) -> Iterator[str]:
    from proctor.infer.selection.redundant import without_implied
    from proctor.verify.wording import count

    for s in pack.suppressions:
        if s.expired(today):
            yield f"the suppression of rule {s.rule} ({s.reason}) ended on {s.until}"
    unmeasured = [r for r in pack.invariants if r.false_alarm is None or not r.false_alarm.tested]
    if unmeasured:
        yield f"{count(len(unmeasured), 'rule')} of {len(pack.invariants)} without a measured rate of false alarms"
    narrow = [r for r in pack.invariants if r.precondition.unconditional and r.support.programs < 2 and not _bound(r, known)]
    yield from _each(narrow, "learned from one program, and it has no precondition that says so")
    failing = [r for r in pack.invariants if r.false_alarm is not None and r.false_alarm.failed]
    yield from _each(failing, "it failed on held-out healthy runs")
    by_id = {r.id: r for r in pack.invariants}
    implied = without_implied(list(by_id.values()), known)[1]
    for redundant in implied[:_LISTED]:
        yield f"{redundant.rule}: rule {redundant.kept} implies it"
    if len(implied) > _LISTED:
        yield f"and {len(implied) - _LISTED:,} more rules that another one implies"


def _bound(rule: Invariant, known: Mapping[str, Relation]) -> bool:
    """Whether the hypothesis itself says in which programs it holds."""
    relation = known.get(rule.relation)
    return relation is not None and any(rule.hypothesis.get(name) for name in relation.narrowing)


def _each(rules: Sequence[Invariant], complaint: str) -> Iterator[str]:
    for rule in rules[:_LISTED]:
        yield f"{rule.id} ({rule.text[:80]}): {complaint}"
    if len(rules) > _LISTED:
        yield f"and {len(rules) - _LISTED:,} more rules: {complaint}"
