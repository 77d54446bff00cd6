"""A verifier that is killed and started again: same keys, same beginnings, nothing told twice, nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.verdicts import Book, Steps, failed, held, violation

from proctor.errors import TraceError
from proctor.verify.lifecycle import Policy
from proctor.verify.lifecycle.snapshot import VERSION


@pytest.fixture
def path(tmp_path):
    return tmp_path / "verify" / "incidents.json"


def test_a_restarted_verifier_tells_nobody_again(path):
    book = Book(path=path)
    first = book.step(5, failed(violation("a", 5, variable="x")))
    book.book.taken()
    book.kill(away=100)
    assert book.book.restored and book.book.unsent == []
    assert book.step(6, failed(violation("a", 6, variable="x"))) == []
    assert book.step(6, failed(violation("b", 6, variable="x"))) == []
    [incident] = book.book.incidents
    assert (incident.key, incident.began) == (first[0].key, first[0].began) and set(incident.rules) == {"a", "b"}


def test_what_nobody_took_is_given_out_again(path):
    book = Book(path=path)
    told = book.step(5, failed(violation("a", 5)))
    book.kill()
    assert book.book.unsent == told
    book.book.taken()
    book.kill()
    assert book.book.unsent == []


def test_time_that_it_was_away_counts(path):
    book = Book(Policy(hold_s=0, clean=1, flap_window_s=60), path=path)
    book.step(1, failed(violation("a", 1)))
    book.step(2, held("a"))
    book.kill(away=61)
    book.step(3, failed(violation("a", 3)))
    assert book.told[-1].began > book.told[0].began


def test_steps_that_a_new_verifier_reads_once_more_are_no_evidence_of_health(path):
    book = Book(Policy(hold_s=10, clean=3), path=path)
    book.step(20, failed(violation("a", 20)))
    book.kill(away=100)  # what is on disk is judged again, from the first step on
    for step in range(20):
        book.step(step, held("a"))
    book.tick()
    book.step(20, failed(violation("a", 20)))
    assert book.actions == ["trigger"] and book.states == {"a": "firing"}
    for step in range(21, 24):
        book.step(step, held("a"))
    book.tick(10)
    assert book.actions == ["trigger", "resolve"]


def test_a_step_counts_once_however_often_it_is_judged(path):
    book = Book(Policy(hold_s=0, clean=10), path=path)
    book.step(1, failed(violation("a", 1)))
    for _ in range(3):
        for step in range(2, 7):
            book.step(step, held("a"))
        book.kill()
    assert book.states == {"a": "firing"}


def test_state_that_is_not_known_after_a_restart_is_no_evidence_of_health(path):
    book = Book(Policy(hold_s=0, clean=3), path=path)
    book.step(20, failed(violation("a", 20), met=8))
    book.kill()
    for step in range(21, 40):
        book.step(step, held("a", met=6))  # two tensors were not sent since
    assert book.actions == ["trigger"]
    for step in range(40, 43):
        book.step(step, held("a", met=8))
    assert book.actions == ["trigger", "resolve"]


def test_after_lost_records_neither_is_a_step_that_shows_less():
    book = Book(Policy(hold_s=0, clean=3))
    book.step(20, failed(violation("a", 20), met=8))
    book.book.coverage({"gap": 5})
    for step in range(21, 40):
        book.step(step, held("a", met=6))
    assert book.states["a"] == "firing"


@pytest.mark.parametrize("while_away", [False, True])
def test_steps_of_the_job_s_next_life_count_from_0(path, while_away):
    book = Book(Policy(hold_s=0, clean=3), path=path)
    book.book.joined(0, "0-11")
    book.step(20, failed(violation("a", 20)))
    if while_away:
        book.kill()
    else:
        book.book.begin_life()
    book.book.joined(0, "0-22")
    for step in range(3):
        book.step(step, held("a"))
    assert book.actions == ["trigger", "resolve"]


def test_a_clock_that_is_set_back_changes_no_duration(path):
    book = Book(Policy(hold_s=5, clean=1), path=path)
    book.step(1, failed(violation("a", 1)))
    book.time -= 500  # epoch seconds and the other clock, as after a reboot
    book.kill()
    book.step(2, held("a"))
    assert book.actions == ["trigger"]
    assert [n.action for n in book.tick(6)] == ["resolve"]


def test_being_away_is_an_incident_and_over_by_itself(path):
    book = Book(path=path)
    assert not book.book.restored
    book.step(1, failed(violation("a", 1)))
    book.kill()
    [notice] = book.book.restarted("steps 2 to 9")
    assert (notice.code, notice.tier, notice.severity) == ("PR203", "ticket", "warning")
    assert notice.details["gap"] == "steps 2 to 9" and notice.key == "proctor:job:PR203:world"
    assert [n.action for n in book.tick(301, heard={})] == ["resolve"]


def test_a_job_that_ended_is_not_carried_on(path):
    book = Book(path=path)
    book.step(1, failed(violation("a", 1)))
    book.book.close(finished=True)
    book.kill()
    assert not book.book.restored and book.states == {"a": "firing"}


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', b'{"version": "x"}', b"[" * 100_000, b'{"version": %d}' % (VERSION + 1)],
)
def test_a_state_that_is_not_one_is_an_error_in_one_line(path, data):
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(TraceError) as error:
        Book(path=path)
    assert "\n" not in str(error.value) and error.value.hint


def test_mutated_states_never_escape_as_something_else(path):
    book = Book(path=path)
    book.step(5, *[failed(violation(f"r{i}", 5, variable=f"v{i % 3}")) for i in range(5)])
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bytes(bad))
        with contextlib.suppress(TraceError):
            Book(path=path).step(6, held("r0"), failed(violation("r1", 6)))


def test_the_state_of_another_job_is_refused(path):
    Book(path=path).step(1, failed(violation("a", 1)))
    path.write_bytes(path.read_bytes().replace(b'"job":"job"', b'"job":"other"', 1))
    with pytest.raises(TraceError, match="of the job 'other'"):
        Book(path=path)


def test_a_full_disk_is_said_and_stops_nothing(path, monkeypatch):
    book = Book(path=path)
    book.step(1, failed(violation("a", 1)))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(book.step(2, failed(violation("b", 2)))) == 1
    assert book.book.save_error == "No space left on device"
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    assert book.book.save() and book.book.save_error == ""


def test_the_state_stays_small_whatever_is_found(path):
    book = Book(path=path)
    book.steps(Steps(0, 1, [failed(violation(f"{i:05}", 0, variable="v" * 5000, seen="s" * 50_000)) for i in range(600)]))
    assert path.stat().st_size < 200_000


_VERIFIER = """
import sys, time
from pathlib import Path
from helpers.verdicts import RELATIONS, Steps, failed, violation
from proctor.verify.lifecycle import IncidentBook

folder = Path(sys.argv[1])
book = IncidentBook("job", "host", state_path=folder / "incidents.json", relations=RELATIONS)
progress, sent = folder / "progress", (folder / "sent").open("a", buffering=1)

def send(notices):
    for n in notices:
        sent.write(f"{n.key} {n.action.value} {n.began} {n.at}\\n")
    book.taken()

send(book.unsent)
for step in range(int(progress.read_text() or 0) if progress.exists() else 0, 3000):
    rule = step // 3
    send(book.judged([Steps(step, step + 1, [failed(violation(f"r{rule}", 10 * step, variable=f"v{rule}"))])]))
    fresh = folder / "progress.new"
    fresh.write_text(str(step))
    fresh.replace(progress)
"""


def test_killed_again_and_again_it_loses_nothing_and_makes_nothing_up(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    rng = random.Random(1)
    for _ in range(4):
        before = (tmp_path / "progress").read_text() if (tmp_path / "progress").exists() else ""
        child = subprocess.Popen([sys.executable, "-c", _VERIFIER, str(tmp_path)], env=environment)
        try:
            deadline = time.monotonic() + 60
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
                if (tmp_path / "progress").exists() and (tmp_path / "progress").read_text() != before:
                    break
            time.sleep(rng.uniform(0, 0.02))
        finally:
            child.kill()
            child.wait()
    last = Book(path=tmp_path / "incidents.json")
    lines = (tmp_path / "sent").read_text().splitlines() + [
        f"{n.key} {n.action.value} {n.began} {n.at}" for n in last.book.unsent
    ]
    told = {tuple(line.split()) for line in lines}
    keys = [key for key, action, _, _ in told if action == "trigger"]
    rules = {f"proctor:job:r{step // 3}:world" for step in range(int((tmp_path / "progress").read_text()) + 1)}
    assert len(keys) == len(set(keys)), "told twice with another moment"
    assert len(lines) <= len(told) + 4, "more than one kill can explain"
    assert {i.key for i in last.book.incidents if i.open} >= set(keys)
    assert rules <= set(keys) or len(rules) > 50
