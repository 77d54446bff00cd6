"""What ranks say of their cost is added up, and nonsense counts as nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from proctor.verify.service.job import Job
from proctor.verify.service.overhead import Overheads


def said(**more: Any) -> dict[str, Any]:
    return {"overhead": {"seconds": 1.0, "budget": 0.01, "share": 0.009, "looked": 50, "steps": 100, "delay": 42, **more}}


def test_seconds_of_all_ranks_are_added_up() -> None:
    overheads = Overheads()
    assert overheads.hear("0-1", said()) == 1.0
    assert overheads.hear("0-1", said(seconds=1.5)) == 0.5
    assert overheads.hear("1-2", said(seconds=2.0, share=0.02, looked=20)) == 2.0
    worst = overheads.worst()
    assert (worst.seconds, worst.share, worst.looked, worst.delay) == (3.5, 0.02, 20, 42)


def test_words_say_what_it_cost_and_how_long_a_step_waits() -> None:
    overheads = Overheads()
    overheads.hear("0-1", said())
    words = overheads.words()
    assert "0.9 %" in words and "42 steps" in words
    overheads.hear("1-2", said(round=16))
    assert "every 16 steps" in overheads.words()
    overheads.hear("0-1", said(share=0.05))
    assert "could not be kept" in overheads.words()


def test_words_do_not_give_a_share_that_was_not_measured() -> None:
    overheads = Overheads()
    overheads.hear("0-1", said(share=0.0, looked=100, delay=0, seconds=0.31))
    words = overheads.words()
    assert "0.3 s" in words and "all looked at" in words and "0.0 %" not in words


@pytest.mark.parametrize("info", [{}, {"overhead": 3}, {"overhead": {"seconds": "x", "steps": None, "looked": True}}, {"overhead": {"seconds": float("nan")}}])
def test_nonsense_counts_as_nothing(info: dict[str, Any]) -> None:
    overheads = Overheads()
    assert overheads.hear("0-1", info) == 0.0
    assert overheads.words() == ""


def test_what_did_not_come_by_itself_is_read_in_the_files_of_the_run(tmp_path: Path) -> None:
    for name, text in {"0-1": json.dumps(said(delay=186)), "1-2": "[", "2-3": "[1]", "3-4": json.dumps({"overhead": "dear"})}.items():
        (tmp_path / "procs" / name).mkdir(parents=True)
        (tmp_path / "procs" / name / "process.json").write_text(text)
    (tmp_path / "procs" / "4-5").mkdir()
    job = Job(tmp_path, (), (), False, MagicMock(), MagicMock(), MagicMock(), print, time.monotonic, print, MagicMock(), 600.0)
    job.read_costs()
    assert job.overheads.worst().delay == 186
    (tmp_path / "none").mkdir()
    job.run = tmp_path / "none"
    job.read_costs()
