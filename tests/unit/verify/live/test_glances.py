"""Glances of ranks: whoever was equal and is not any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proctor.verify.live.glances import _ASKED, Glances

A, B, C, PIECE = "0-1", "1-2", "2-3", "0:fc.weight:0"


def hear(glances: Glances, *values: dict[str, int], first: int = 0) -> list[tuple[int, str]]:
    """Each step's fingerprints by process; what was said."""
    found = [glances.hear(p, [(first + i, PIECE, fp)]) for i, step in enumerate(values) for p, fp in step.items()]
    return [one for one in found if one is not None]


def test_replicas_that_part_are_seen_in_the_step_in_which_they_part() -> None:
    healthy = [{A: i, B: i} for i in range(5)]
    assert hear(Glances(), *healthy, {A: 5, B: 6}, {A: 7, B: 8}) == [(5, PIECE)]


def test_what_was_never_equal_may_differ() -> None:
    assert hear(Glances(), *({A: i, B: i + 100} for i in range(20))) == []


def test_what_was_equal_before_the_first_updates_only_is_not_taken_for_a_replica() -> None:
    assert hear(Glances(), {A: 0, B: 0}, {A: 0, B: 0}, *({A: i, B: i + 100} for i in range(1, 20))) == []


def test_groups_of_replicas_are_told_apart() -> None:
    healthy = [{A: i, B: i, C: i + 50} for i in range(5)]
    assert hear(Glances(), *healthy, {A: 9, B: 9, C: 10}) == []
    assert hear(Glances(), *healthy, {A: 9, B: 10, C: 10}) == [(5, PIECE)]


def test_a_rank_that_glances_less_often_is_compared_where_it_did() -> None:
    steps = [{A: i, B: i, C: i} if i % 4 == 0 else {A: i, B: i} for i in range(24)]
    assert hear(Glances(), *steps, {A: 24, B: 24, C: 99}) == [(24, PIECE)]


def test_whoever_is_behind_is_waited_for_and_a_rank_that_left_is_not() -> None:
    glances = Glances()
    assert hear(glances, *({A: i, B: i} for i in range(5))) == []
    assert glances.hear(A, [(5, PIECE, 5), (6, PIECE, 6)]) is None
    assert glances.hear(B, [(5, PIECE, 55)]) == (5, PIECE)
    glances.leave(B)
    assert glances.hear(A, [(7, PIECE, 7)]) is None and not glances._waiting


def test_a_program_whose_replicas_part_on_purpose_is_not_looked_at_for_ever() -> None:
    steps = [{A: i, B: i if i % 8 else i + 1000} for i in range(1, 2_000)]
    assert len(hear(Glances(), *steps)) == _ASKED


@given(st.permutations([(p, i) for p in (A, B, C) for i in range(8)]))
def test_the_order_in_which_ranks_are_heard_changes_nothing(order: list[tuple[str, int]]) -> None:
    glances, at = Glances(), dict.fromkeys((A, B, C), 0)
    said = []
    for process, _ in order:  # each in its own order
        step, at[process] = at[process], at[process] + 1
        said.append(glances.hear(process, [(step, PIECE, step + 100 * (process == C and step == 7))]))
    asked = [one for one in said if one is not None]
    assert asked == [] or asked == [(7, PIECE)]
