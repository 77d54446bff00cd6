"""What a check calls violated, held, not triggered and unknown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import ALL, Happens, rule
from helpers.runs import write_run

from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.invariant import Evidence, Record, RunSupport, Severity, Support, Tier
from proctor.invariants.pack import Pack, Provenance, Source
from proctor.invariants.relations import Detail
from proctor.invariants.trace import Trace
from proctor.verify.checker import MAX_PLACES, check, exit_code
from proctor.verify.coverage import coverage
from proctor.verify.rules import merge_rules

HAPPENS = rule("test_happens", first=ZERO, then=BACK)
IN_EVAL = Precondition(((Condition("phase", Kind.CONSTANT, "eval"),),))


def finite(name: str = "w", **more):
    return rule("test_finite", variable=name, **more)


def states(*flags: int, name: str = "w"):
    return [{"var": {"name": name}, "step": s, "flags": f} for s, f in enumerate(flags)]


def test_healthy_run_is_clean(judge):
    result = judge([process()], [HAPPENS])
    assert (result.incidents, result.checked, result.not_triggered, result.unknown) == ([], 1, 0, 0)
    assert (result.steps, result.ranks, result.notes) == (6, 1, [])


def test_violation_names_its_first_place_and_its_extent(judge):
    result = judge([process(0, 2, lost_from=4), process(1, 2, lost_from=3)], [HAPPENS])
    (v,) = result.violations
    assert (v.step, v.rank, v.source, v.function) == (3, 1, "train.py:3", ZERO)
    assert (v.count, v.places) == (5, [(3, 1), (4, 0), (4, 1), (5, 0), (5, 1)])
    assert [(e.step, e.rank) for e in v.evidence] == v.places
    assert v.confirmed
    assert (v.code, v.when, v.severity) == ("PR190", "always", Severity.ERROR)


def test_same_step_goes_to_the_lower_rank_whatever_the_order_of_processes(judge):
    result = judge([process(1, 2, lost_from=2, pid=1), process(0, 2, lost_from=2, pid=9)], [HAPPENS])
    assert result.violations[0].rank == 0


def test_one_failing_example_is_not_confirmed(judge):
    (v,) = judge([process(steps=4, lost_from=3)], [HAPPENS]).violations
    assert (v.count, v.confirmed) == (1, False)


def test_precondition_decides_which_examples_count(judge):
    bad = process(steps=3, lost_from=2)
    in_train = rule("test_happens", Precondition(((Condition("phase", Kind.CONSTANT, "train"),),)), first=ZERO, then=BACK)
    in_eval = rule("test_happens", IN_EVAL, first=ZERO, then=BACK)
    unheard = rule("test_happens", Precondition(((Condition("no column", Kind.EXIST),),)), first=ZERO, then=BACK)
    never = rule("test_happens", Precondition(()), first=ZERO, then=BACK)
    result = judge([bad], [in_train, in_eval, unheard, never])
    assert [v.id for v in result.violations] == [in_train.id]
    assert (result.checked, result.not_triggered) == (1, 3)


def test_rules_that_share_a_hypothesis_are_judged_by_their_own_precondition(judge):
    rules = [HAPPENS, rule("test_happens", IN_EVAL, first=ZERO, then=BACK), rule("test_happens", first=BACK, then=BACK)]
    result = judge([process(lost_from=0)], rules)
    assert [v.id for v in result.violations] == [HAPPENS.id]
    assert (result.checked, result.not_triggered) == (2, 1)


def test_only_undecided_examples_are_unknown_and_some_are_not(judge):
    result = judge([{"states": states(16, 16) + states(16, 0, name="v") + states(16, 4, name="u")}], [finite(), finite("v"), finite("u")])
    assert (result.checked, result.unknown) == (2, 1)
    assert [v.variable for v in result.violations] == ["u"]


def test_nothing_recorded_means_not_triggered(judge):
    result = judge([{"calls": []}], [HAPPENS, finite()])
    assert (result.checked, result.not_triggered) == (0, 2)


def test_lost_records_make_absence_unknown_but_not_what_was_seen(judge):
    result = judge([process(lost_from=2, dropped=3, states=states(0, 4))], [HAPPENS, finite()])
    assert [v.relation for v in result.violations] == ["test_finite"]
    assert result.checked == 2  # steps before the loss showed the rule holding
    assert any("lost 3 records" in n for n in result.notes)


def test_lost_records_where_it_never_held_leave_the_rule_unknown(judge):
    result = judge([process(lost_from=0, dropped=1)], [HAPPENS])
    assert (result.violations, result.checked, result.unknown) == ([], 0, 1)
    assert not any("could not be evaluated" in n for n in result.notes)


def test_loss_on_one_rank_does_not_excuse_another(judge):
    result = judge([process(0, 2, dropped=3), process(1, 2, lost_from=3)], [HAPPENS])
    assert [v.rank for v in result.violations] == [1]


def test_loss_on_one_rank_excuses_all_when_examples_span_ranks(judge, monkeypatch):
    monkeypatch.setattr(Happens, "across_ranks", True, raising=False)
    assert judge([process(0, 2, dropped=3), process(1, 2, lost_from=3)], [HAPPENS]).violations == []


def test_last_step_of_a_killed_process_is_not_judged_for_absence(judge):
    result = judge([process(steps=6, lost_from=5, finished=False)], [HAPPENS])
    assert (result.violations, result.checked) == ([], 1)
    earlier = judge([process(steps=6, lost_from=4, finished=False)], [HAPPENS])
    assert earlier.violations[0].places == [(4, 0)]
    assert any("did not finish" in n for n in earlier.notes)


def test_calls_cut_earlier_than_states_are_judged_up_to_the_cut(judge):
    cut = process(steps=4, lost_from=3, finished=False, states=states(0, 0, 0, 0, 0, 0, 0, 0))
    assert judge([cut], [HAPPENS]).violations == []


def test_missing_rank_is_noted_and_inconclusive(judge, tmp_path):
    result = judge([process(0, 4), process(2, 4)], [HAPPENS])
    assert any(n.startswith("ranks 1, 3 of 4 left no record") for n in result.notes)
    run = write_run(tmp_path / "again", [process(0, 2)])
    seen = coverage(Trace.load([run]))
    assert (seen.missing, seen.complete) == ({0: [1]}, False)


def test_impossible_world_size_is_bounded(judge):
    result = judge([process(0, 2_000_000_000)], [HAPPENS])
    assert len(max(result.notes, key=len)) < 300


def test_relation_that_raises_costs_only_its_own_rules(judge):
    result = judge([process(lost_from=2)], [rule("test_broken"), rule("test_broken", a="b"), HAPPENS])
    assert (len(result.violations), result.unknown) == (1, 2)
    assert [n for n in result.notes if "test_broken could not be evaluated: ZeroDivisionError: first line" in n]


def test_detail_that_raises_keeps_the_violation(judge, monkeypatch):
    def broken(*_):
        raise KeyError("first")

    monkeypatch.setattr(Happens, "detail", broken)
    (v,) = judge([process(lost_from=2)], [HAPPENS]).violations
    assert (v.step, v.count) == (2, 4)
    assert "KeyError" in v.seen


def test_rule_of_unknown_relation_is_unknown(tmp_path):
    trace = Trace.load([write_run(tmp_path / "r", [process()])])
    result = check(trace, [Pack([HAPPENS], skipped=["rule x: unknown relation 'y', skipped"])], relations={})
    assert (result.checked, result.unknown) == (0, 2)
    assert any("'test_happens' is not known" in n for n in result.notes)


def test_a_rule_of_two_packs_is_one_with_the_support_of_both(judge):
    def seen_in(severity: Severity, **passed: int) -> Pack:
        runs = tuple(RunSupport(run, n) for run, n in sorted(passed.items()))
        known = Support(sum(passed.values()), 0, len(passed), len(passed))
        told = msgspec.structs.replace(HAPPENS, support=known, severity=severity, evidence=Evidence(runs=runs))
        return Pack([told], Provenance(sources=tuple(Source(run, f"{run}.py") for run in sorted(passed))))

    ours, theirs = seen_in(Severity.ERROR, a=3), seen_in(Severity.WARNING, a=3, b=4, c=5)
    for packs in ([ours, theirs], [theirs, ours, theirs]):
        (one,) = merge_rules(packs)
        assert one.support == Support(12, 0, 3, 3)  # a run that both were learned from counts once
        assert one.severity is Severity.ERROR  # what may be a choice elsewhere is a law of this program
    assert merge_rules([seen_in(Severity.ERROR, a=3), seen_in(Severity.ERROR, b=4)])[0].support == Support(7, 0, 2, 2)


def test_one_hypothesis_asked_for_in_two_circumstances_is_violated_once(judge):
    in_training = rule("test_happens", Precondition(((Condition("phase", Kind.CONSTANT, "train"),),)), first=ZERO, then=BACK)
    wide = msgspec.structs.replace(in_training, support=Support(900, 0, 9, 9))
    result = judge([process(lost_from=2)], [HAPPENS, wide])
    assert [v.id for v in result.violations] == [wide.id]  # the best supported one
    assert result.checked == 2


def test_a_pack_may_not_say_of_itself_that_a_rule_pages(judge):
    claimed = msgspec.structs.replace(HAPPENS, tier=Tier.PAGE)
    assert [v.tier for v in judge([process(lost_from=2)], [claimed]).violations] == [Tier.TICKET]
    proven = msgspec.structs.replace(HAPPENS, record=Record(300, 0))
    assert [v.tier for v in judge([process(lost_from=2)], [proven]).violations] == [Tier.PAGE]


def test_a_result_says_which_rules_held(judge):
    other = rule("test_happens", first=BACK, then=BACK)
    assert judge([process(lost_from=2)], [HAPPENS, other]).held == {other.id}


def test_places_are_bounded_and_keep_first_and_last_of_each_rank(judge):
    (v,) = judge([process(r, 3, steps=400, lost_from=10 * r) for r in range(3)], [HAPPENS]).violations
    assert v.count == 400 + 390 + 380
    assert len(v.places) <= MAX_PLACES
    for rank in range(3):
        steps = [s for s, r in v.places if r == rank]
        assert (min(steps), max(steps)) == (10 * rank, 399)


def test_progress_is_told_each_relation(judge, tmp_path):
    told = []
    trace = Trace.load([write_run(tmp_path / "r", [process()])])
    check(trace, [Pack([HAPPENS, finite()])], relations=ALL, progress=lambda *a: told.append(a))
    assert told == [(0, 2, "test_finite"), (1, 2, "test_happens")]


def test_frame_without_a_site_column_is_accepted(judge, monkeypatch):
    plain = Happens.examples

    def without(self, trace, hypotheses):
        found = plain(self, trace, hypotheses)
        return type(found)(found.frame.drop("site"), found.fields)

    monkeypatch.setattr(Happens, "examples", without)
    assert judge([process(lost_from=2)], [HAPPENS]).violations[0].source == "train.py:3"  # the last call before


@pytest.mark.parametrize(
    ("fail_on", "expected"),
    [(Severity.INFO, 1), (Severity.ERROR, 1), (Severity.CRITICAL, 0), (None, 0)],
)
def test_exit_code_counts_only_what_is_severe_enough(judge, fail_on, expected):
    result = judge([process(lost_from=2)], [HAPPENS])
    assert exit_code(result, fail_on, complete=True) == expected


def test_exit_code_is_inconclusive_without_a_checked_rule_or_with_a_missing_rank(judge):
    healthy = judge([process()], [HAPPENS])
    assert exit_code(healthy, Severity.ERROR, complete=True) == 0
    assert exit_code(healthy, Severity.ERROR, complete=False) == 3
    assert exit_code(judge([process()], [finite()]), Severity.ERROR, complete=True) == 3
    violated = judge([process(lost_from=2)], [HAPPENS])
    assert exit_code(violated, Severity.ERROR, complete=False) == 1


def test_two_runs_are_checked_as_one(tmp_path: Path):
    paths = [write_run(tmp_path / n, [process(lost_from=k)]) for n, k in (("a", None), ("b", 4))]
    result = check(Trace.load(paths), [Pack([HAPPENS])], relations=ALL)
    assert (result.ranks, result.violations[0].step) == (2, 4)


def test_text_of_a_rule_without_one_is_said_by_its_relation(judge):
    silent = msgspec.structs.replace(HAPPENS, text="")
    assert judge([process(lost_from=2)], [silent]).violations[0].text.startswith(ZERO)
    assert Detail("a", "b").advice == ""
