"""One pack of several: rules of one hypothesis become one rule that no healthy run of any of the packs contradicts.

What a pack says of a hypothesis is a `Part`: the precondition, in which families of programs it was learned, and
whether its runs have failing examples, of which the precondition excludes every one. Parts of one hypothesis:

* Where no pack saw a failure, the preconditions are alternatives: the rule holds where any of them does.
* Where pack B saw failures, a clause of pack A holds only together with B's precondition, unless the clause is of a
  family of programs that B does not know.
* A hypothesis that is left without a clause is withdrawn, and stays so.

A merged rule keeps its parts, and a merge is a function of the set of all parts, so it is associative, commutative
and idempotent, and a run that several packs were learned from counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final

import msgspec

from proctor.infer import evidence as why_believed
from proctor.infer.evidence import family_id
from proctor.invariants import relations
from proctor.invariants.condition import FAMILY, Condition, Kind, Precondition
from proctor.invariants.invariant import (
    ANY_FAMILY,
    Evidence,
    FalseAlarm,
    Invariant,
    Part,
    Record,
    Support,
    hypothesis_id,
    invariant_id,
    union,
)
from proctor.invariants.pack import Pack, Provenance, Refuted, Source

# Beyond these a rule is weakened: a clause that would become too many is dropped, then the last in order are.
MAX_CLAUSES: Final = 64  # that one clause becomes
MAX_TOTAL: Final = 512  # of a precondition
_NEVER: Final = Precondition(())
_NOTHING: Final = Support(0, 0, 0, 0)

Clause = frozenset[Condition]


def merge_packs(packs: Sequence[Pack]) -> tuple[Pack, list[str]]:
    """Merge packs.

    Returns:
        the pack, and one sentence for each rule whose preconditions differed.
    """
    origin = merge_provenance([p.provenance for p in packs])
    refuted = _refuted(packs)
    found: dict[str, list[tuple[Invariant, tuple[Part, ...]]]] = defaultdict(list)
    for pack in packs:
        families = families_of(pack)
        for rule in (*pack.invariants, *pack.withdrawn):
            found[hypothesis_id(rule.hypothesis)].append((rule, rule.parts or (part_of(rule, families),)))
    rules: list[Invariant] = []
    withdrawn: list[Invariant] = []
    notes: list[str] = []
    renamed: dict[str, str] = {}
    for key, copies in sorted(found.items()):
        parts = _union(part for _, ours in copies for part in ours)
        refuting = [Part(_NEVER, _NOTHING, r.families, failing=True) for r in refuted if r.hypothesis == key]
        rule = _merged([r for r, _ in copies], parts, combine([*parts, *refuting]), origin.sources)
        (rules if rule.precondition.any_of else withdrawn).append(rule)
        notes += _note(rule, parts, refuting)
        renamed |= {copy.id: rule.id for copy, _ in copies}
    rulings = {msgspec.structs.replace(s, rule=renamed.get(s.rule, s.rule)) for p in packs for s in p.suppressions}
    hushed = tuple(sorted(rulings))
    requires = _requires([p.requires for p in packs])
    whole = Pack(sorted(rules, key=lambda r: (r.relation, r.id)), origin, [], requires, hushed, refuted, tuple(withdrawn))
    return msgspec.structs.replace(whole, skipped=sorted({s for p in packs for s in p.skipped})), notes


def combine(parts: Sequence[Part]) -> Precondition:
    """Where a hypothesis holds according to all of its parts."""
    distinct = list(dict.fromkeys(parts))
    preconditions = {p.precondition for p in distinct}
    if len(preconditions) == 1:
        return preconditions.pop()
    clauses: set[Clause] = set()
    for i, part in enumerate(distinct):
        for clause in map(frozenset, part.precondition.any_of):
            limits = [
                [frozenset(theirs) for theirs in other.precondition.any_of]
                for j, other in enumerate(distinct)
                if j != i and other.failing and not _foreign(clause, other)
            ]
            clauses |= _narrowed(clause, limits)
    if len(clauses) > MAX_TOTAL:
        clauses = set(sorted(clauses, key=_clause_key)[:MAX_TOTAL])
    weakest = {c for c in clauses if not any(other < c for other in clauses)}
    for precondition in sorted(preconditions, key=msgspec.json.encode):  # as it was, so that the rule keeps its id
        if {frozenset(c) for c in precondition.any_of} == weakest:
            return precondition
    return Precondition(tuple(tuple(sorted(c, key=_condition_key)) for c in sorted(weakest, key=_clause_key)))


def part_of(rule: Invariant, families: tuple[str, ...]) -> Part:
    """What a pack that was learned from runs of these families says of a rule's hypothesis."""
    return Part(rule.precondition, rule.support, families, rule.support.excluded > 0, rule.evidence.runs)


def families_of(pack: Pack) -> tuple[str, ...]:
    """Families of the programs that a pack was learned from; `ANY_FAMILY` where they are not known."""
    sources = pack.provenance.sources
    known = bool(sources) and all(s.families for s in sources)
    return tuple(sorted({f for s in sources for f in s.families})) if known else ANY_FAMILY


def merge_provenance(origins: Sequence[Provenance]) -> Provenance:
    """Where a merged pack comes from; numbers of packs that do not say from which runs they are cannot be added up."""
    by_id: dict[str, Source] = {}
    for source in sorted(s for o in origins for s in o.sources):
        by_id.setdefault(source.id, source)
    sources = tuple(by_id[k] for k in sorted(by_id))
    libraries: dict[str, set[str]] = defaultdict(set)
    for origin in origins:
        for name, versions in origin.libraries.items():
            libraries[name] |= _words(versions, ",")
    measured = {o.measured for o in origins}
    return Provenance(
        tool=", ".join(sorted({w for o in origins for w in _words(o.tool, ",")})),
        torch=", ".join(sorted({w for o in origins for w in _words(o.torch, ",")})),
        runs=max([len(sources), *(o.runs for o in origins)]),
        programs=sorted({p for o in origins for p in o.programs}),
        records=max([sum(s.records for s in sources), *(o.records for o in origins)]),
        sources=sources,
        libraries={k: ", ".join(sorted(v)) for k, v in sorted(libraries.items())},
        command="\n".join(sorted({w for o in origins for w in _words(o.command, "\n")})),
        made=max((o.made for o in origins), default=""),
        note="\n".join(sorted({w for o in origins for w in _words(o.note, "\n")})),
        measured=measured.pop() if len(measured) == 1 else None,
    )


def _refuted(packs: Sequence[Pack]) -> tuple[Refuted, ...]:
    return tuple(
        sorted({Refuted(r.hypothesis, r.families or families_of(pack)) for pack in packs for r in pack.refuted})
    )


def _merged(
    copies: Sequence[Invariant], parts: tuple[Part, ...], precondition: Precondition, sources: Sequence[Source]
) -> Invariant:
    evidence = Evidence()
    for copy in copies:
        evidence = why_believed.merge(evidence, copy.evidence)
    # What supported a rule supports what is left of it for sure where all of the rule is left.
    whole = [p for p in parts if precondition.covers(p.precondition)] or parts
    counted = Evidence()
    for part in whole:
        counted = why_believed.merge(counted, Evidence(runs=part.runs))
    evidence = msgspec.structs.replace(evidence, runs=counted.runs)
    diverse = why_believed.diversity(evidence, sources)
    severity = max((c.severity for c in copies), key=lambda s: s.level)
    alarm = _worst([c.false_alarm for c in copies if c.false_alarm is not None])
    record = worst_record([c.record for c in copies if c.record is not None])
    relation = relations.registry().get(copies[0].relation)
    rule = Invariant(
        id=invariant_id(copies[0].hypothesis, precondition),
        hypothesis=copies[0].hypothesis,
        precondition=precondition,
        support=_support([p.support for p in whole], evidence, diverse.programs),
        text=min(c.text for c in copies),
        severity=severity,
        evidence=evidence,
        diversity=diverse,
        false_alarm=alarm,
        parts=parts,
        record=record,
        definitions=union(c.definitions for c in copies),
    )
    return rule if relation is None else msgspec.structs.replace(rule, tier=relation.tier(rule))


def _union(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts that say the same become one, with the runs of both."""
    alike: dict[tuple[Precondition, tuple[str, ...], bool], Part] = {}
    for part in parts:
        held = alike.setdefault((part.precondition, part.families, part.failing), part)
        runs = why_believed.merge(Evidence(runs=held.runs), Evidence(runs=part.runs)).runs
        joined = msgspec.structs.replace(held, support=_largest([held.support, part.support]), runs=runs)
        alike[part.precondition, part.families, part.failing] = joined
    return tuple(sorted(alike.values(), key=msgspec.json.encode))


def _foreign(clause: Clause, part: Part) -> bool:
    """Whether a clause speaks of a family of programs that a pack has not seen."""
    named = [c.value for c in clause if c.field == FAMILY and c.kind is Kind.CONSTANT and c.value is not None]
    return part.families != ANY_FAMILY and any(family_id(value) not in part.families for value in named)


def _narrowed(clause: Clause, limits: Sequence[Sequence[Clause]]) -> set[Clause]:
    """The clause and one of each list of others, in all ways that can be met."""
    found = {clause}
    for others in limits:
        found = {c for c in (a | b for a, b in product(found, others)) if _possible(c)}
        if len(found) > MAX_CLAUSES:
            return set()
    return found


def _possible(clause: Clause) -> bool:
    values: dict[str, set[str | None]] = defaultdict(set)
    kinds: dict[str, set[Kind]] = defaultdict(set)
    for c in clause:
        kinds[c.field].add(c.kind)
        if c.kind is Kind.CONSTANT:
            values[c.field].add(c.value)
    unequal = any({Kind.CONSISTENT, Kind.UNEQUAL} <= k for k in kinds.values())
    unset = any(None in v and Kind.EXIST in kinds[field] for field, v in values.items())
    return not unequal and not unset and all(len(v) == 1 for v in values.values())


def _condition_key(condition: Condition) -> tuple[str, str, bool, str]:
    return condition.field, condition.kind, condition.value is not None, condition.value or ""


def _clause_key(clause: Clause) -> list[tuple[str, str, bool, str]]:
    return sorted(map(_condition_key, clause))


def _support(copies: Sequence[Support], evidence: Evidence, programs: int) -> Support:
    counted = Support(
        passed=sum(r.passed for r in evidence.runs),
        excluded=sum(r.excluded for r in evidence.runs),
        runs=sum(r.passed > 0 for r in evidence.runs),
        programs=programs,
    )
    return _largest([*copies, counted])


def _largest(several: Sequence[Support]) -> Support:
    return Support(*(max(getattr(s, f) for s in several) for f in Support.__struct_fields__))


def _worst(measured: Sequence[FalseAlarm]) -> FalseAlarm | None:
    """The most failures on the most runs: packs may have been measured on the same ones."""
    if not measured:
        return None
    failed = max(m.failed for m in measured)
    return FalseAlarm.of(max(failed, *(m.tested for m in measured)), failed)


def worst_record(several: Sequence[Record]) -> Record | None:
    """As `_worst`: packs may have been held against the same programs, so that nothing can be added up."""
    if not several:
        return None
    failed, retracted = max(r.failed for r in several), max(r.retracted for r in several)
    return Record(
        tested=max(failed, retracted, *(r.tested for r in several)),
        failed=failed,
        retracted=retracted,
        programs=max(r.programs for r in several),
        corpus=", ".join(sorted({w for r in several for w in _words(r.corpus, ",")})),
    )


def _requires(all_of: Sequence[dict[str, str]]) -> dict[str, str]:
    wanted: dict[str, set[str]] = defaultdict(set)
    for requires in all_of:
        for name, versions in requires.items():
            wanted[name] |= _words(versions, ",")
    return {name: ",".join(sorted(versions)) for name, versions in sorted(wanted.items())}


def _words(text: str, separator: str) -> set[str]:
    return {word.strip() for word in text.split(separator)} - {""}


def _note(rule: Invariant, parts: Sequence[Part], refuting: Sequence[Part]) -> list[str]:
    said = [p.precondition for p in parts]
    if len(set(said)) < 2 and not refuting:
        return []
    subject = f"{rule.text} ({rule.relation})"
    if not rule.precondition.any_of:
        why = "healthy runs of one contradict the other" if not refuting else "healthy runs of another refute it"
        return [f"withdrawn: {subject}: {why}"]
    now = rule.precondition.say()
    if all(rule.precondition.covers(p) for p in said):
        return [f"kept: {subject}: {len(set(said))} preconditions became alternatives: {now}"]
    return [f"narrowed: {subject}: to where no healthy run of any pack contradicts it: {now}"]
