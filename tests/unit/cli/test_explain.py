"""`proctor explain ID`: why a rule is believed, and where it held and failed in a run."""

from __future__ import annotations

import msgspec
import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import rule
from helpers.runs import write_run

from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.invariant import Evidence, Example, FalseAlarm, RunSupport, Support
from proctor.invariants.pack import Pack, Provenance, Source, write_pack

TRAIN = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))


@pytest.fixture
def believed(tmp_path):
    """A pack with one rule that has evidence on both sides."""
    good = Example(1, 0, "a.py", "r0", ZERO, "a.py:3", "", "zero_grad before backward", (("mode", "m"), ("phase", "train")))
    bad = Example(4, 1, "b.py", "r1", ZERO, "b.py:9", "zero_grad never ran", "zero_grad before backward", (("mode", "m"), ("phase", "eval")))
    runs = tuple(RunSupport(f"r{i}", 4, i % 2) for i in range(10))
    sources = tuple(Source(f"r{i}", f"{'ab'[i % 2]}.py", f"run-{i}") for i in range(10))
    made = msgspec.structs.replace(
        rule("test_happens", TRAIN, first=ZERO, then=BACK),
        support=Support(40, 5, 10, 2),
        evidence=Evidence((good,), (bad,), runs),
        false_alarm=FalseAlarm.of(10, 0),
    )
    path = tmp_path / "believed.json"
    write_pack(Pack([made], Provenance(sources=sources)), path)
    return path, made


def test_passing_and_failing_examples_stand_side_by_side(proctor, believed):
    path, made = believed
    code, out, _ = proctor("explain", made.id, "-i", path)
    assert code == 0
    (row,) = (line for line in out.splitlines() if "a.py (run-0), step 1, rank 0" in line)
    assert "b.py (run-1), step 4, rank 1" in row
    for words in ("seen: zero_grad never ran", "a.py:3", "b.py:9", "0 of 10 held-out healthy runs", "deserves a ticket"):
        assert words in out, words


def test_it_says_which_condition_separates_them(proctor, believed):
    path, made = believed
    out = proctor("explain", made.id, "-i", path)[1]
    assert "What separates them: phase is train" in out
    (row,) = (line for line in out.splitlines() if "separates: a condition" in line)
    for words in ("phase", "train", "eval"):
        assert words in row


def test_it_names_the_runs_and_counts_the_rest(proctor, believed):
    path, made = believed
    out = proctor("explain", made.id, "-i", path)[1]
    assert "a.py: run-0, run-2, run-4, run-6, run-8; b.py: run-1, run-3, run-5; and 2 more" in out


def test_with_a_run_the_rule_is_evaluated_there(proctor, pack, good, bad, happens):
    code, out, _ = proctor("explain", happens.id, "-i", pack, "--run", good)
    assert code == 0
    assert "HOLDS" in out
    out = proctor("explain", happens.id, "-i", pack, "--run", bad)[1]
    for words in ("VIOLATED", "never ran before", "the training loop", "step 2", "Where it applies in this run"):
        assert words in out, words


def test_a_rule_that_does_not_apply_shows_what_failed_outside(proctor, tmp_path, bad):
    path = tmp_path / "p.json"
    never = Precondition(((Condition("phase", Kind.CONSTANT, "checkpoint"),),))
    made = rule("test_happens", never, first=ZERO, then=BACK)
    write_pack(Pack([made]), path)
    out = proctor("explain", made.id, "-i", path, "--run", bad)[1]
    for words in ("does not apply", "Where it does not apply and did not hold: 4 examples"):
        assert words in out, words


def test_lost_records_make_it_unknown_here_too(proctor, pack, tmp_path, happens):
    run = write_run(tmp_path / "lossy", [process(lost_from=0, dropped=5)])
    out = proctor("explain", happens.id, "-i", pack, "--run", run)[1]
    assert "UNKNOWN" in out


def test_a_violation_says_where_the_rule_held(proctor, tmp_path, bad):
    example = Example(1, 0, "healthy.py", "r0", ZERO, "healthy.py:3", "", "zero_grad before backward")
    made = msgspec.structs.replace(rule("test_happens", first=ZERO, then=BACK), evidence=Evidence((example,)))
    path = tmp_path / "p.json"
    write_pack(Pack([made]), path)
    assert "held at       healthy.py, step 1, rank 0, healthy.py:3" in proctor("check", bad, "-i", path)[1]
    assert "healthy.py, step 1, rank 0, healthy.py:3: zero_grad before backward" in (bad / "report.html").read_text()


def test_a_run_that_cannot_be_read_is_2(proctor, pack, tmp_path, happens):
    assert proctor("explain", happens.id, "-i", pack, "--run", tmp_path / "none")[0] == 2


def test_a_hostile_pack_cannot_drive_the_terminal(proctor, tmp_path):
    evil = "\x1b[31mred\x1b[0m\u202e[bold]x"
    example = Example(0, 0, evil, evil, evil, evil, evil, evil, ((evil, evil),))
    made = msgspec.structs.replace(rule("test_happens", first=ZERO, then=BACK), text=evil, evidence=Evidence((example,), (example,)))
    path = tmp_path / "p.json"
    write_pack(Pack([made]), path)
    code, out, _ = proctor("explain", made.id, "-i", path)
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
