from __future__ import annotations

import pytest
from infer_fakes import CALLS, Broken, OnlyCalls, Picky, trace

from proctor.infer.engine import STAGES, Options, infer
from proctor.infer.preconditions import Why
from proctor.infer.selection.select import distinct
from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.invariant import Hypothesis, Severity, Support, hypothesis_id, invariant_id


def test_rules_carry_precondition_support_text_and_severity() -> None:
    rules, report = infer(trace(CALLS), [OnlyCalls()], strict=True)
    said = {rule.text: rule for rule in rules}
    assert set(said) == {"step is all that is called", "zero_grad is all that is called"}
    step = said["step is all that is called"]
    assert step.precondition.say() == "phase is train"
    assert step.support == Support(passed=12, excluded=5, runs=2, programs=2)
    assert said["zero_grad is all that is called"].support == Support(
        passed=4, excluded=13, runs=1, programs=1
    )
    assert step.severity is Severity.WARNING
    assert step.id == invariant_id(step.hypothesis, step.precondition)
    assert report.rules == 2 and report.errors == {}


def test_what_is_a_programs_own_is_kept_where_all_programs_keep_it() -> None:
    class OwnCalls(OnlyCalls):
        own = True

    rules, report = infer(trace(CALLS), [OwnCalls()], strict=True)
    assert [rule.text for rule in rules] == ["step is all that is called"]  # zero_grad is so in one of two programs
    assert report.dropped["a manner of one program among several"] == 1
    alone, _ = infer(trace(CALLS, runs=1), [OwnCalls()], strict=True)
    assert len(alone) == 2


def test_every_hypothesis_that_was_proposed_is_accounted_for() -> None:
    _, report = infer(trace(CALLS), [OnlyCalls()], strict=True)
    (tally,) = report.tallies
    assert tally.hypotheses == 4  # repeated proposals count once
    assert tally.dropped == {Why.RARE: 1, Why.NEVER: 1}
    assert tally.rules + sum(tally.dropped.values()) == tally.hypotheses
    assert (tally.conditional, tally.unconditional) == (2, 0)
    assert tally.examples == 3 * len(CALLS)


def test_a_rule_that_a_second_run_contradicts_is_not_learned() -> None:
    other_run = [(1, "zero_grad", "train") for _ in range(9)]
    rules, report = infer(trace([*CALLS, *other_run]), [OnlyCalls()], strict=True)
    assert [rule.hypothesis.text("function") for rule in rules] == ["zero_grad"] * len(rules)
    assert report.dropped[Why.CONTRADICTED] >= 1


def test_of_what_others_have_taught_one_example_is_enough_unless_something_speaks_against_it() -> None:
    step = Hypothesis.of("only", function="step")
    where = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))
    known = Options(strict=True, prior={hypothesis_id(step): where})
    few = trace([(0, "step", "train"), (1, "step", "train")])
    assert infer(few, [OnlyCalls()], options=Options(strict=True))[0] == []
    rules, report = infer(few, [OnlyCalls()], options=known)
    assert [(rule.hypothesis, rule.precondition, rule.support.passed) for rule in rules] == [(step, where, 2)]
    assert report.dropped.get(Why.RARE, 0) == 0
    against = trace([(0, "step", "train"), (1, "step", "train"), (1, "zero_grad", "train")])
    rules, report = infer(against, [OnlyCalls()], options=known)
    assert [rule.hypothesis.text("function") for rule in rules] == []
    assert report.refuted == ()


def test_relation_may_refuse_a_rule() -> None:
    rules, report = infer(trace(CALLS), [Picky()], strict=True)
    assert [rule.hypothesis.text("function") for rule in rules] == ["zero_grad"]
    assert report.dropped[Why.REFUSED] == 1


def test_what_a_library_keeps_to_itself_makes_no_rule_and_what_the_user_does_makes_one() -> None:
    calls = [(p, name, phase) for p in (0, 1) for name, phase in (("torch._step", "train"), ("__main__.Loop._step", "eval")) for _ in range(9)]
    rules, report = infer(trace(calls), [OnlyCalls()], strict=True)
    assert [rule.hypothesis.text("function") for rule in rules] == ["__main__.Loop._step"]
    assert report.dropped[Why.PRIVATE] == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_relation_that_fails_costs_only_its_own_rules(jobs: int) -> None:
    rules, report = infer(trace(CALLS), [Broken(), OnlyCalls()], jobs=jobs)
    assert len(rules) == 2
    assert report.errors == {"broken": "ZeroDivisionError: first line"}
    assert [t.relation for t in report.tallies] == ["broken", "only"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_strict_mode_raises_what_the_relation_raised(jobs: int) -> None:
    with pytest.raises(ZeroDivisionError):
        infer(trace(CALLS), [Broken(), OnlyCalls()], jobs=jobs, strict=True)


def test_a_relation_that_no_worker_can_load_is_reported() -> None:
    class Local(OnlyCalls):
        name = "local"

    rules, report = infer(trace(CALLS), [Local(), OnlyCalls()], jobs=2)
    assert len(rules) == 2
    assert "local" in report.errors


def test_processes_give_what_one_process_gives() -> None:
    relations = [OnlyCalls(), Picky()]
    alone, _ = infer(trace(CALLS), relations)
    pooled, _ = infer(trace(CALLS), relations, jobs=2)
    assert pooled == alone


def test_progress_is_told_of_every_stage_in_order() -> None:
    heard: list[tuple[str, int, int]] = []
    infer(trace(CALLS), [OnlyCalls()], progress=lambda *event: heard.append(event), strict=True)
    assert list(dict.fromkeys(stage for stage, _, _ in heard)) == list(STAGES)
    for stage in STAGES:
        done = [(n, total) for s, n, total in heard if s == stage]
        assert done == [(n, done[0][1]) for n in range(done[0][1] + 1)]


def test_order_of_the_trace_does_not_change_what_is_learned() -> None:
    forward, _ = infer(trace(CALLS), [OnlyCalls()])
    backward, _ = infer(trace(CALLS[::-1]), [OnlyCalls()])
    assert [(r.id, r.support) for r in forward] == [(r.id, r.support) for r in backward]


def test_equal_rules_are_kept_once() -> None:
    rules, _ = infer(trace(CALLS), [OnlyCalls()])
    assert distinct([*rules, *rules]) == rules
