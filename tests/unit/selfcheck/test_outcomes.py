"""Outcomes put together, and shown."""

from __future__ import annotations

import json

import pytest

from proctor.oracle.selfcheck import report
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome, conclude

BROKEN = Outcome(relation="causal", claim="c", subject="LM", verdict="different", reason="sees <b>ahead</b>\x1b[31m", expected="e", seen="s", culprit=Culprit("attention", "Attention", "lm.py:3", "softmax"), advice="look")
HELD = Outcome(relation="inputs", subject="LM", verdict="equivalent", reason="ids matters")
IDLE = Outcome(relation="padding", verdict="not-applicable", reason="no mask")
UNKNOWN = Outcome(relation="compile", verdict="inconclusive", reason="the compiler fails")


@pytest.mark.parametrize(("outcomes", "verdict", "code"), [([BROKEN, HELD], "different", 1), ([HELD, UNKNOWN], "equivalent", 0), ([IDLE, UNKNOWN], "inconclusive", 3), ([], "inconclusive", 3)])
def test_the_verdict_is_that_of_the_worst_relation(outcomes, verdict, code):
    found = conclude(outcomes)
    assert (found.verdict, found.exit_code) == (verdict, code)


def test_one_culprit_on_several_ranks_is_told_once():
    other = Outcome(relation="causal", subject="LM", verdict="different", reason="again", culprit=BROKEN.culprit, rank=1)
    assert len(conclude([BROKEN, other]).outcomes) == 1


def test_the_terminal_names_what_broke_and_what_was_not_checked():
    text = report.as_text(conclude([HELD, IDLE, UNKNOWN, BROKEN], notes=["n"]))
    for part in ("DIFFERENT", "BROKEN  causal", "attention (Attention), softmax, lm.py:3", "Not checked", "the compiler fails", "Does not apply", "no mask", "note: n"):
        assert part in text
    assert "\x1b" not in text


def test_json_is_one_object_with_all_outcomes():
    told = json.loads(report.as_json(conclude([HELD, IDLE, BROKEN])))
    assert told["schema"] == 1 and told["verdict"] == "different" and len(told["outcomes"]) == 3
    assert told["outcomes"][0]["culprit"]["source"] == "lm.py:3"


def test_the_page_escapes_what_a_program_says():
    page = report.as_html(conclude([BROKEN]))
    assert "<b>ahead" not in page and "&lt;b&gt;ahead" in page
