"""Which hypotheses are worth being rules? Those that apply somewhere we can name, with enough evidence (TrainCheck §3.7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from proctor.infer import evidence as why_believed
from proctor.infer.preconditions import Outcome, Why
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import (
    Evidence,
    FalseAlarm,
    Hypothesis,
    Invariant,
    Support,
    hypothesis_id,
    invariant_id,
)
from proctor.invariants.pack import Refuted, Source
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Process

MIN_PASSED = 3  # passing examples that meet the precondition
Keep = Callable[[Hypothesis, Support, Precondition], bool]


def select(
    relation: Relation,
    hypotheses: Sequence[Hypothesis],
    outcomes: Mapping[int, Outcome],
    processes: Sequence[Process],
    *,
    min_passed: int = MIN_PASSED,
    evidence: Mapping[int, Evidence] | None = None,
    sources: Iterable[Source] = (),
) -> tuple[list[Invariant], Counter[str]]:
    """Turn outcomes into rules.

    A relation may define `keep(hypothesis, support, precondition) -> bool` to refuse rules that are true and useless.

    Args:
        relation: whose hypotheses these are.
        hypotheses: what was proposed.
        outcomes: by index of the hypothesis.
        processes: of the trace, for the runs and programs that support a rule.
        min_passed: passing examples that a rule needs.
        evidence: by index of the hypothesis, `infer.evidence.collect`; rules go without when absent.
        sources: the runs that evidence names, `infer.evidence.sources`.

    Returns:
        rules in the order of the hypotheses, and how many hypotheses were dropped for which reason.
    """
    keep: Keep | None = getattr(relation, "keep", None)
    known = list(sources)
    rules: list[Invariant] = []
    dropped: Counter[str] = Counter()
    for index, hypothesis in enumerate(hypotheses):
        outcome = outcomes.get(index, _UNSEEN)
        precondition = outcome.precondition
        if precondition is None:
            dropped[outcome.why or Why.SUPERFICIAL] += 1
            continue
        support = _support(outcome, processes)
        if support.passed < min_passed:
            dropped[Why.RARE] += 1
        elif keep is not None and not keep(hypothesis, support, precondition):
            dropped[Why.REFUSED] += 1
        else:
            identity = invariant_id(hypothesis, precondition)
            text = relation.say(hypothesis)
            rule = Invariant(identity, hypothesis, precondition, support, text, relation.severity_of(hypothesis))
            rules.append(attach(relation, rule, (evidence or {}).get(index, Evidence()), known))
    return rules, dropped


def attach(relation: Relation, rule: Invariant, evidence: Evidence, sources: Iterable[Source]) -> Invariant:
    """A rule with its evidence; how diverse that is follows from it."""
    whole = msgspec.structs.replace(rule, evidence=evidence, diversity=why_believed.diversity(evidence, sources))
    return msgspec.structs.replace(whole, tier=relation.tier(whole))


def vetted(relation: Relation, rule: Invariant, false_alarm: FalseAlarm) -> Invariant:
    """A rule with what cross-validation measured; whether it may page follows from it."""
    whole = msgspec.structs.replace(rule, false_alarm=false_alarm)
    return msgspec.structs.replace(whole, tier=relation.tier(whole))


def refuted(hypotheses: Sequence[Hypothesis], outcomes: Mapping[int, Outcome]) -> list[Refuted]:
    """Hypotheses that these runs contradict, for the pack: no rule of another pack may bring them back."""
    against = (Why.CONTRADICTED, Why.SUPERFICIAL)
    return sorted(Refuted(hypothesis_id(hypotheses[i])) for i, o in outcomes.items() if o.precondition is None and o.why in against)


def distinct(rules: Sequence[Invariant]) -> list[Invariant]:
    """Rules without repetitions; of equal ones the first stays."""
    return list({rule.id: rule for rule in reversed(rules)}.values())[::-1]


_UNSEEN = Outcome(None, Why.NEVER)


def _support(outcome: Outcome, processes: Sequence[Process]) -> Support:
    seen = [processes[p] for p in outcome.procs if p < len(processes)]
    return Support(
        passed=outcome.passed,
        excluded=outcome.excluded,
        runs=len({p.run for p in seen}),
        programs=len({p.program for p in seen}),
    )
