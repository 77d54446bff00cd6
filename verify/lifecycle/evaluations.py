"""What was judged, step by step, whatever pieces it was judged in: so that the same run has the same incidents."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from proctor.invariants.relations import Confirm, Relation
from proctor.invariants.verdict import Violation
from proctor.verify.checker import Judged
from proctor.verify.incident import urgency

_MAX_STEPS: Final = 10_000  # without a failure, counted of one rule and round


class Judgement(Protocol):
    """What is known of some steps, as `online.Round` says it: of each rule that applied from `first` to before `end`."""

    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def judged(self) -> Sequence[Judged]: ...


@dataclass(frozen=True)
class Failure:
    """One rule that failed in one step."""

    violation: Violation
    fails: int
    confirm: Confirm
    order: tuple[Any, ...]
    wide: int = 0  # examples that the rule was decided on, in a step of this judgement


@dataclass
class StepVerdict:
    """What one step says: the failures, the most upstream first, and the rules that were decided and held, with the number of
    examples that they were decided on.

    Of rules that are judged together: those that must see `ahead` more steps are judged later (`Relation.ahead`).
    """

    step: int
    ahead: int = 0
    failures: list[Failure] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)


def by_step(
    judgements: Iterable[Judgement], followed: Container[str], relations: Mapping[str, Relation]
) -> list[StepVerdict]:
    """The verdicts of some judgements, in the order of their steps, and of one step in the order in which they come
    where every step is judged by itself.

    A rule that was undecided somewhere in a judgement held nowhere in it, and neither did one that is told once (`Relation.told_once`). Where it applied to fewer examples than there
    are steps, the earlier steps are taken for those that it applied to.

    Args:
        judgements: in any order.
        followed: ids of rules whose passing matters.
        relations: by name.
    """
    rounds = list(judgements)
    failing = {j.rule.id for r in rounds for j in r.judged if j.violation is not None}
    steps: dict[tuple[int, int], StepVerdict] = {}
    upstream = {name: relation.upstream for name, relation in relations.items()}
    for one in rounds:
        for judged in one.judged:
            if judged.rule.id not in failing and judged.rule.id not in followed:
                continue
            relation = relations.get(judged.rule.relation)
            ahead = relation.ahead if relation is not None else 0
            failed = _failing_steps(judged, one.first)
            wide = -(-(judged.met - judged.undecided) // max(1, one.end - one.first))
            for i, step in enumerate(failed):
                verdict = steps.setdefault((step, ahead), StepVerdict(step, ahead))
                verdict.failures.append(_failure(judged, step if i else None, relations, upstream, wide))
            if judged.undecided == 0 and not (relation is not None and relation.told_once(judged.rule.hypothesis)):
                for step in _held_steps(one, set(failed), judged.met - judged.failed):
                    steps.setdefault((step, ahead), StepVerdict(step, ahead)).held[judged.rule.id] = wide
    for verdict in steps.values():
        verdict.failures.sort(key=lambda f: f.order)
    return [steps[key] for key in sorted(steps)]


def _failing_steps(judged: Judged, first: int) -> list[int]:
    v = judged.violation
    if v is None:
        return []
    return sorted({s for s, _ in v.places if s is not None} | ({v.step} if v.step is not None else set())) or [first]


def _held_steps(one: Judgement, failed: set[int], passing: int) -> list[int]:
    found: list[int] = []
    for step in range(one.first, one.end):
        if len(found) >= min(passing, _MAX_STEPS):
            break
        if step not in failed:
            found.append(step)
    return found


def _failure(
    judged: Judged, again: int | None, relations: Mapping[str, Relation], upstream: Mapping[str, int], wide: int
) -> Failure:
    v = judged.violation
    assert v is not None
    if again is not None:
        v = msgspec.structs.replace(v, step=again)
    relation = relations.get(v.relation)
    confirm: Confirm = relation.confirm_of(judged.rule.hypothesis) if relation is not None else "at once"
    own = {} if relation is None else {v.id: relation.upstream_of(judged.rule.hypothesis)}
    return Failure(v, 0 if again is not None else judged.failed, confirm, urgency(v, {**upstream, **own}), wide)
