"""Steps that are left out make rules unknown, never violated: with `--every`, and with a budget."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.live.watching import PROCTOR
from helpers.warm import python

from proctor.native import ACTIVE

# Two optimizers, one of which rests now and then, and dropout in one of two models: what was judged wrongly across gaps.
PROGRAM = """
import torch
from torch import nn

torch.manual_seed(0)
maker, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
of_maker, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, judge))
for step in range(NUMBER):
    of_judge.zero_grad()
    (judge(maker(torch.randn(4, 8)).detach()).mean() - judge(torch.randn(4, 8)).mean()).backward()
    of_judge.step()
    if step % 3 == 0:
        of_maker.zero_grad()
        (-judge(maker(torch.randn(4, 8))).mean()).backward()
        of_maker.step()
print("RESULT", float(judge(maker(torch.ones(4, 8))).sum().detach()))
"""


def watched(folder: Path, *options: str, program: str = PROGRAM, number: int = 80) -> tuple[str, str, Path]:
    run = folder / "run"
    (folder / "train.py").write_text(program.replace("NUMBER", str(number)))
    command = [*PROCTOR, "watch", "-o", str(run), "--no-capsules", "--fail-on", "info", *options, "--", python(), str(folder / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    bare = subprocess.run([python(), str(folder / "train.py")], capture_output=True, text=True, env=environment, timeout=300, check=True)
    return done.stdout, bare.stdout, run


def left_out(run: Path) -> list[str]:
    """What a check of the run says of steps that were left out."""
    done = subprocess.run([*PROCTOR, "check", str(run), "--format", "json"], capture_output=True, text=True, timeout=300, check=False)
    return [note for note in json.loads(done.stdout)["notes"] if "left out" in note]


def test_every_nth_step_makes_no_false_alarm_and_a_check_says_what_was_left_out(tmp_path: Path) -> None:
    out, bare, run = watched(tmp_path, "--every", "7", "--warmup", "8")
    assert out == bare
    steps = 82  # the last is a forward alone
    recorded = 8 + len(range(14, steps, 7))
    assert [note.partition(" were")[0] for note in left_out(run)] == [f"{steps - recorded} of {steps} steps"]


def test_a_short_job_is_looked_at_in_full_though_a_budget_is_the_default(tmp_path: Path) -> None:
    out, bare, run = watched(tmp_path)
    assert out == bare
    said = json.loads(next(run.glob("procs/*/process.json")).read_text())["overhead"]
    assert said["budget"] == 0.01 and said["looked"] == said["steps"] == 81
    assert left_out(run) == []


def test_a_budget_makes_no_false_alarm_and_says_what_it_left_out(tmp_path: Path) -> None:
    out, bare, run = watched(tmp_path, "--budget", "0.1%", "--warmup", "8")
    assert out == bare
    said = json.loads(next(run.glob("procs/*/process.json")).read_text())["overhead"]
    assert said["steps"] == 81, "as many as where all steps are looked at"
    assert 8 < said["looked"] < said["steps"] and said["budget"] == 0.001 and said["seconds"] > 0 and said["delay"] > 0
    assert [note.partition(" were")[0] for note in left_out(run)] == [f"{said['steps'] - said['looked']} of 82 steps"]
    assert any(json.loads(line)["data"].get("delay") == said["delay"] for line in (run / "verify" / "events.jsonl").read_text().splitlines())


def test_updates_that_are_only_counted_are_of_the_steps_that_they_would_be_of_otherwise(tmp_path: Path) -> None:
    out, bare, run = watched(tmp_path, "--budget", "0.01%", "--warmup", "8", number=1500)
    assert out == bare
    said = json.loads(next(run.glob("procs/*/process.json")).read_text())["overhead"]
    assert said["steps"] == 1501 and said["looked"] < 200
    assert [note.partition(" were")[0] for note in left_out(run)] == [f"{1501 - said['looked']:,} of 1,502 steps"]


# What a generator made goes into the discriminator first of all, with a gradient, and nothing says whose turn it is; an attack on an input looks the same,
# but that its gradients are thrown away.
GIVEN = """
import torch
from torch import nn

torch.manual_seed(0)
maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
of_maker, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, judge))
for step in range(NUMBER):
    made = maker(torch.randn(4, 8))
    judge.zero_grad()
    judge(made.detach()).mean().backward()
    of_judge.step()
    maker.zero_grad()
    (-judge(made).mean()).backward()
    of_maker.step()
print("RESULT", float(judge(maker(torch.ones(4, 8))).sum().detach()))
"""
ATTACKED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(NUMBER):
    x = torch.randn(4, 8, requires_grad=True)
    model(x).mean().backward()
    optimizer.zero_grad()
    model((x + x.grad.sign()).detach()).square().mean().backward()
    optimizer.step()
print("RESULT", float(model.weight.sum().detach()))
"""
# Whether it could be followed without hooks, where it is watched.
SAYS = """
import pathlib, sys
attach = sys.modules.get("proctor.instrument.attach")
if attach is not None and attach._observer is not None and attach._observer.sleep is not None:
    pathlib.Path(__file__).with_name("sleeps").write_text(str(attach._observer.sleep.possible))
"""


@pytest.mark.skipif(ACTIVE != "native", reason="the twin never falls asleep")
@pytest.mark.parametrize("program", [GIVEN, ATTACKED])
def test_inputs_with_a_gradient_are_followed_without_hooks(tmp_path: Path, program: str) -> None:
    steps = []
    for budget in ("0.01%", "none"):
        (folder := tmp_path / budget).mkdir()
        out, bare, run = watched(folder, "--budget", budget, "--warmup", "8", program=program + SAYS, number=400)
        assert out == bare
        said = json.loads(next(run.glob("procs/*/process.json")).read_text())["overhead"]
        steps.append(said["steps"])
        assert (said["looked"] < 200) is (budget != "none")
    assert (tmp_path / "0.01%" / "sleeps").read_text() == "True"
    assert steps[0] == steps[1] >= 399, "as many as where all steps are looked at"


BREAKS_US = """
import builtins, time
import torch
from torch import nn

def broken(of):
    if type(of) is dict:
        raise RuntimeError("not for dicts")
    return length(of)

torch.manual_seed(0)
model, length = nn.Linear(4, 2), len
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    if step == 10:
        builtins.len = broken
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.06)
print("RESULT", float(model.weight.sum().detach()))
"""


def test_a_program_that_breaks_our_writer_is_not_judged_clean(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BREAKS_US)
    run, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}

    def ran(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command], capture_output=True, text=True, env=environment, timeout=300, check=False)

    bare, watched = ran(python(), str(tmp_path / "train.py")), ran(*PROCTOR, "record", "-o", str(run), "--", python(), str(tmp_path / "train.py"))
    assert (watched.returncode, watched.stdout) == (0, bare.stdout)
    assert "probe writer is off" in watched.stderr
    checked = ran(*PROCTOR, "check", str(run))
    assert checked.returncode == 3 and "an error of Proctor's ended the recording" in checked.stdout, checked.stdout
