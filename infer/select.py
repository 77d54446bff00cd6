"""Which hypotheses are worth being rules? Those that apply somewhere we can name, with enough evidence (TrainCheck §3.7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from proctor.infer.preconditions import Outcome, Why
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Invariant, Support, invariant_id
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Process

MIN_PASSED = 3  # passing examples that meet the precondition
Keep = Callable[[Hypothesis, Support, Precondition], bool]


def select(
    relation: Relation,
    hypotheses: Sequence[Hypothesis],
    outcomes: dict[int, Outcome],
    processes: Sequence[Process],
    *,
    min_passed: int = MIN_PASSED,
) -> tuple[list[Invariant], Counter[str]]:
    """Turn outcomes into rules.

    A relation may define `keep(hypothesis, support, precondition) -> bool` to refuse rules that are true and useless.

    Returns:
        rules in the order of the hypotheses, and how many hypotheses were dropped for which reason.
    """
    keep: Keep | None = getattr(relation, "keep", None)
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
            rules.append(Invariant(identity, hypothesis, precondition, support, text, relation.severity))
    return rules, dropped


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
