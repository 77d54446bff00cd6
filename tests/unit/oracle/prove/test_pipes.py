"""Pipelines and microbatches, by the schedule that ran."""

from __future__ import annotations

import pytest
from helpers.oracle.prove_pipes import by_hand

from proctor.oracle.prove import assert_proved, prove


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_pipeline_by_hand_is_proved(order: str) -> None:
    verdict = assert_proved(by_hand(order=order), by_hand(order=order), "pp=2")
    assert verdict.local


def test_what_is_divided_at_the_end_is_what_was_divided_at_the_beginning() -> None:
    """By a number that is no size of a group, and that both sides divide by."""
    verdict = assert_proved(by_hand(microbatches=3), by_hand(microbatches=3, late=True), "pp=2")
    assert verdict.local
    assert prove(by_hand(microbatches=3), by_hand(microbatches=3, late=True, mistake="divided by another"), "pp=2").verdict == "DIFFERENT"


@pytest.mark.parametrize("mistake", ["last first", "not divided", "last left out"])
def test_a_wrong_schedule_is_refuted(mistake: str) -> None:
    assert prove(by_hand(), by_hand(order="gpipe", mistake=mistake), "pp=2").verdict == "DIFFERENT"


def test_layers_and_microbatches_bring_no_new_lemmas() -> None:
    """What a proof costs is its different lemmas."""
    shown = []
    for count, microbatches in ((2, 2), (6, 4)):
        verdict = assert_proved(by_hand(count, microbatches), by_hand(count, microbatches), "pp=2")
        shown.append(int(verdict.why.split(" lemmas")[0].rsplit("(", 1)[1]))
    assert shown[1] <= shown[0] + 6, shown
