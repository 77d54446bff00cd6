"""An incident's life: when it is believed, joined, told, over, and back again."""

from __future__ import annotations

import re

import pytest
from helpers.verdicts import Book, Steps, failed, held, violation

from proctor.invariants.invariant import Hypothesis, Severity, Tier
from proctor.invariants.relations import registry
from proctor.verify.lifecycle import Policy
from proctor.verify.lifecycle.notices import dedup_key
from proctor.verify.lifecycle.record import MAX_KEPT, MAX_RULES

W = {"variable": "fc.weight"}


def test_a_contradiction_is_told_at_once_and_once():
    book = Book()
    [notice] = book.step(5, failed(violation("a", 5, **W)))
    assert (notice.action, notice.step, notice.code) == ("trigger", 5, "PR191")
    assert notice.key == "proctor:job:a:world"
    for step in range(6, 30):
        assert book.step(step, failed(violation("a", step, **W))) == []
    assert book.states == {"a": "firing"}


def test_what_may_be_chance_is_believed_when_it_fails_again():
    book = Book()
    assert book.step(5, failed(violation("a", 5, "chance"))) == []
    assert book.states == {"a": "suspected"}
    assert book.step(6, held("a", family="chance")) == []
    assert [n.step for n in book.step(7, failed(violation("a", 7, "chance")))] == [5]


def test_a_suspicion_that_does_not_repeat_is_forgotten():
    book = Book()
    book.step(5, failed(violation("a", 5, "chance")))
    for step in (6, 7, 8):
        book.step(step, held("a", family="chance"))
    assert book.told == [] and book.states == {}


def test_failing_on_many_ranks_of_one_step_is_not_failing_again():
    book = Book()
    v = violation("a", 5, "chance", places=[(5, 0), (5, 1), (5, 2)])
    assert book.step(5, failed(v, met=4)) == []


def test_several_failing_steps_of_one_round_count_each():
    book = Book()
    v = violation("a", 5, "chance", places=[(5, 0), (6, 0)])
    assert len(book.steps(Steps(5, 7, [failed(v, met=2)]))) == 1


def test_unknown_neither_opens_nor_ends():
    book = Book(Policy(hold_s=0, clean=2))
    book.step(1, held("a", met=3, undecided=3))
    assert book.states == {}
    book.step(2, failed(violation("a", 2)))
    for step in range(3, 20):
        book.step(step, held("a", met=3, undecided=3))
        book.step(step, held("a", met=3, undecided=1))
        book.step(step, held("a", met=0))
    assert book.actions == ["trigger"] and book.states == {"a": "firing"}


def test_it_is_over_after_clean_evaluations_of_all_its_rules():
    book = Book(Policy(hold_s=0, clean=3))
    book.step(1, failed(violation("a", 1, **W)), failed(violation("b", 1, **W)))
    for step in range(2, 8):
        assert book.step(step, held("a")) == []  # b did not apply
    book.step(8, held("a"), held("b"))
    book.step(9, held("a"), held("b"))
    [notice] = book.step(10, held("a"), held("b"))
    assert notice.action == "resolve" and notice.key == book.told[0].key and notice.began == book.told[0].began
    assert "its rules held in their last 3 evaluations" in notice.text


def test_what_a_probe_tells_once_is_not_over_since_it_tells_no_more():
    """The rule holds in each step in which nothing is told; the bug goes on."""
    book = Book(Policy(hold_s=0, clean=3))
    book.step(1, failed(violation("a", 1, "once")))
    for step in range(2, 40):
        book.step(step, held("a", family="once"))
    assert book.actions == ["trigger"] and book.states == {"a": "firing"}
    stays = registry()["stays"]
    assert {stays.told_once(Hypothesis.of("stays", mode=mode, what="")) for mode in ("snapshot", "unused")} == {True}
    assert not stays.told_once(Hypothesis.of("stays", mode="update", what=""))


def test_it_is_not_over_before_some_time_has_passed():
    book = Book(Policy(hold_s=30, clean=2))
    book.step(1, failed(violation("a", 1)))
    for step in range(2, 10):
        book.step(step, held("a"))
    assert book.actions == ["trigger"]
    assert [n.action for n in book.tick(31)] == ["resolve"]


def test_what_belongs_to_it_joins_without_another_notice():
    book = Book()
    book.step(1, failed(violation("a", 1, **W)))
    book.step(2, failed(violation("b", 2, variable="fc.bias")))  # same module, a step later
    book.step(90, failed(violation("c", 90, **W)))  # same variable, long after: a consequence
    book.step(91, failed(violation("d", 91, function="outer")))
    assert [len(i.violations) for i in book.book.incidents] == [3, 1]
    assert book.actions == ["trigger", "trigger"]


def test_callers_are_one_cause():
    book = Book()
    calls = frozenset({("outer", "inner")})
    book.step(1, failed(violation("a", 1, function="outer")), failed(violation("b", 1, function="inner")), calls=calls)
    book.step(9, failed(violation("c", 9, function="outer2")), calls=calls)
    assert [len(i.rules) for i in book.book.incidents] == [2, 1]


def test_one_that_is_more_upstream_takes_the_title_and_not_the_key():
    book = Book()
    book.step(3, failed(violation("a", 3, "late", **W)))
    book.step(3, failed(violation("b", 3, "near", **W)))
    [incident] = book.book.incidents
    assert incident.key == "proctor:job:a:world" and incident.title.startswith("fc.weight: b broke")
    assert incident.code == "PR192" and [v.id for v in incident.violations] == ["b", "a"]
    assert book.actions == ["trigger"]


def test_in_one_evaluation_the_most_upstream_gives_the_key():
    book = Book()
    book.step(3, failed(violation("a", 3, "late", **W)), failed(violation("b", 3, "near", **W)))
    assert [n.key for n in book.told] == ["proctor:job:b:world"]


def test_what_is_of_no_particular_step_is_told_like_all_else():
    book = Book()
    [notice] = book.steps(Steps(-1, 1, [failed(violation("a", None, places=[(None, 0)]))]))
    assert notice.step is None and notice.details["since"] == "at no particular step"
    assert book.step(1, failed(violation("a", None, places=[(None, 0)]))) == []


def test_louder_is_news():
    book = Book()
    book.step(1, failed(violation("a", 1, severity=Severity.WARNING, **W)))
    book.step(2, failed(violation("b", 2, severity=Severity.WARNING, **W)))
    [notice] = book.step(3, failed(violation("c", 3, severity=Severity.CRITICAL, **W)))
    assert (notice.action, notice.severity, notice.tier) == ("trigger", Severity.CRITICAL, Tier.TICKET)
    [notice] = book.step(4, failed(violation("d", 4, tier=Tier.PAGE, **W)))
    assert (notice.severity, notice.tier, notice.key) == (Severity.CRITICAL, Tier.PAGE, "proctor:job:a:world")


def test_two_incidents_that_turn_out_to_be_one_are_merged():
    book = Book()
    book.step(1, failed(violation("a", 1, variable="x")))
    book.step(1, failed(violation("b", 1, variable="y")))
    notices = book.step(2, failed(violation("c", 2, variable="x", function="f")))
    assert notices == []
    [notice] = book.step(3, failed(violation("d", 3, variable="y", function="f")))
    assert notice.action == "resolve" and notice.key == "proctor:job:b:world" and "it is part of: x: a broke" in notice.text
    assert [len(i.rules) for i in book.book.incidents if i.open] == [4]


def test_merging_within_one_evaluation_is_told_once():
    book = Book()
    rounds = [Steps(1, 2, [failed(violation("a", 1, variable="x")), failed(violation("b", 1, variable="y"))])]
    rounds += [Steps(2, 3, [failed(violation("c", 2, variable="x", function="f")), failed(violation("d", 2, variable="y", function="f"))])]
    assert [n.key for n in book.steps(*rounds)] == ["proctor:job:a:world"]


def test_a_storm_is_one_incident():
    book = Book()
    many = [failed(violation(f"r{i:02}", 4, variable=f"v{i}")) for i in range(30)]
    [notice] = book.step(4, *many)
    assert notice.title.endswith("and 29 more rules at once")
    assert book.step(5, failed(violation("after", 5, variable="another"))) == []
    assert len(book.step(9, failed(violation("apart", 9, variable="elsewhere")))) == 1


def test_a_storm_over_several_calls_is_one_incident_in_the_end():
    book = Book()
    for i in range(30):
        book.step(4, failed(violation(f"r{i:02}", 4, variable=f"v{i}")))
    assert sum(i.open for i in book.book.incidents) == 1
    firing = {n.key for n in book.told if n.action == "trigger"} - {n.key for n in book.told if n.action == "resolve"}
    assert firing == {"proctor:job:r00:world"}


def test_what_comes_back_keeps_its_key_and_its_beginning():
    book = Book(Policy(hold_s=0, clean=2))
    book.step(1, failed(violation("a", 1, **W)))
    for step in (2, 3):
        book.step(step, held("a"))
    book.tick(60)
    book.step(100, failed(violation("a", 100, **W)))
    assert book.actions == ["trigger", "resolve", "trigger"]
    assert len({(n.key, n.began) for n in book.told}) == 1
    assert "It came back (1 time so far)." in book.told[-1].text
    for step in (101, 102, 103):  # four clean ones are asked for now
        assert book.step(step, held("a")) == []
    assert [n.action for n in book.step(104, held("a"))] == ["resolve"]


def test_chance_that_comes_back_has_to_fail_more_often():
    book = Book(Policy(hold_s=0, clean=2))
    for step in (1, 2):
        book.step(step, failed(violation("a", step, "chance")))
    for step in (3, 4):
        book.step(step, held("a", family="chance"))
    assert book.actions == ["trigger", "resolve"]
    for step in (5, 6):
        assert book.step(step, failed(violation("a", step, "chance"))) == []
    assert [n.action for n in book.step(7, failed(violation("a", 7, "chance")))] == ["trigger"]


def test_after_the_flap_window_it_is_a_new_incident_of_the_same_key():
    book = Book(Policy(hold_s=0, clean=1, flap_window_s=60))
    book.step(1, failed(violation("a", 1)))
    book.step(2, held("a"))
    book.tick(61)
    book.step(3, failed(violation("a", 3)))
    assert [n.key for n in book.told] == ["proctor:job:a:world"] * 3
    assert book.told[2].began > book.told[0].began and "came back" not in book.told[2].text


def test_flapping_is_damped():
    book = Book(Policy(hold_s=0, clean=1, max_retriggers_per_hour=2, flap_window_s=1e6))
    step = 0
    for _ in range(12):
        book.step(step, failed(violation("a", step)))
        for _ in range(40):
            step += 1
            book.step(step, held("a"))
        book.tick(10)
    assert book.actions.count("trigger") == 3
    book.step(step + 1, failed(violation("a", step + 1)))
    assert book.actions.count("trigger") == 3
    book.tick(3600)
    assert book.actions.count("trigger") == 4  # it fires still, and may be told again


def test_what_fires_at_the_end_stays_so_unless_the_policy_says_otherwise():
    for resolve, expected in ((False, []), (True, ["resolve"])):
        book = Book(Policy(resolve_at_end=resolve))
        book.step(1, failed(violation("a", 1)))
        assert [n.action for n in book.book.close(finished=True)] == expected
        assert book.states == {"a": "resolved" if resolve else "firing"}


def test_a_capsule_is_named_in_later_notices():
    book = Book()
    book.step(1, failed(violation("a", 1, severity=Severity.WARNING, **W)))
    assert book.book.attach_capsule("proctor:job:a:world", "capsules/x")
    assert not book.book.attach_capsule("another", "capsules/x")
    [notice] = book.step(2, failed(violation("b", 2, **W)))
    assert notice.details["capsule"] == "capsules/x"


def test_why_there_is_no_capsule_is_said_until_there_is_one():
    book = Book()
    book.step(1, failed(violation("a", 1, severity=Severity.WARNING, **W)))
    book.book.lacks_capsule("proctor:job:a:world", "the job had ended")
    book.book.lacks_capsule("another", "the job had ended")
    [notice] = book.step(2, failed(violation("b", 2, **W)))
    assert notice.details["capsule"] == "the job had ended"
    book.book.attach_capsule("proctor:job:a:world", "capsules/x")
    [notice] = book.step(3, failed(violation("c", 3, severity=Severity.CRITICAL, **W)))
    assert notice.details["capsule"] == "capsules/x"


def test_details_say_what_a_person_needs_in_order():
    book = Book()
    [notice] = book.step(5, failed(violation("a", 5, **W)))
    assert list(notice.details) == ["expected", "seen", "since", "source", "support", "false alarms", "next"]
    assert notice.details["next"] == "proctor explain a --run RUN"
    assert notice.details["since"] == "step 5" and notice.source == "job@host"
    assert notice.text.splitlines() == [
        "fc.weight: a broke (at step 5)",
        "Rule PR191: rule a holds",
        "Expected: a",
        "Seen: a broke",
        "At: train.py:7",
        "Look at it.",
        "Next: proctor explain a --run RUN",
    ]


def test_names_that_would_drive_a_terminal_are_printed():
    book = Book()
    [notice] = book.step(1, failed(violation("a", 1, variable="\x1b[31m\u202e", seen="x\ny\udc80", function="f\n")))
    shown = "".join([notice.title, notice.text.replace("\n", ""), *notice.details.values()])
    assert not re.search("[\x00-\x1f\u202e\ud800-\udfff]", shown)


def test_keys_are_bounded_and_distinct():
    keys = {dedup_key("j" * n, "r", "s" * m) for n in (1, 300, 301) for m in (1, 300, 301)}
    assert len(keys) == 9 and all(len(k.encode()) <= 255 for k in keys)
    assert len(dedup_key("ü" * 200, "r", "ü" * 200).encode()) <= 255


def test_what_is_kept_is_bounded():
    book = Book()
    book.steps(Steps(0, 1, [failed(violation(f"{i}", 0, **W)) for i in range(MAX_RULES + 50)]))
    [incident] = book.book.incidents
    assert len(incident.rules) == MAX_RULES and len(incident.violations) == MAX_KEPT
    assert incident.beside == MAX_RULES - MAX_KEPT and len(book.told) == 1


def test_more_incidents_than_allowed_go_to_the_earliest():
    book = Book(Policy(max_open=5))
    for i in range(30):
        book.step(10 * i, failed(violation(f"r{i}", 10 * i, variable=f"v{i}")))
    assert len(book.book.incidents) == 5 and len(book.told) == 5


@pytest.mark.parametrize(
    ("what", "expected"), [("applied", "at once"), ("finite", "at once"), ("drift", "repeat"), ("burst", "repeat")]
)
def test_numbers_that_are_not_finite_are_no_chance(what, expected):
    known = registry()
    assert known["numeric"].confirm_of(Hypothesis.of("numeric", what=what)) == expected
    assert known["consistent"].confirm == known["agree"].confirm == "at once"
