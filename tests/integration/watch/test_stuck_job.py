"""A job that hangs is reported from its records while it hangs, and after it was killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")
from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Support, invariant_id
from proctor.invariants.pack import Pack
from proctor.invariants.relations.agree import Agree
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

RELATION = Agree()
JOB = """
import sys, tempfile, time, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
def average(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
def work(rank, world, store, kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    other = dist.new_group([0, 1])
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        if rank == 1 and step == 4:
            if kind == "elsewhere":
                dist.barrier(group=other)
            if kind == "asleep":
                time.sleep(300)
        average(model, world)
        optimizer.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (2, tempfile.mktemp(), sys.argv[1]), nprocs=2)
"""


@contextmanager
def running(folder: Path, kind: str) -> Iterator[Path]:
    """The job under `proctor record`, in a session of its own that is killed in the end."""
    script, out = folder / "train.py", folder / "run"
    script.write_text(textwrap.dedent(JOB))
    command = [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--", python(), str(script), kind]
    job = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield out
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def wait_for(out: Path, seconds: float, ranks: int) -> None:
    """Until as many ranks say that they have waited that long."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        facts = [json.loads(p.read_bytes()) for p in out.glob("procs/*/process.json")]
        long = [f for f in facts if any(f["clock"] - o["since"] >= seconds * 1e9 for o in f.get("open", ()))]
        if len(long) >= ranks:
            return
        time.sleep(0.3)
    raise AssertionError("the job does not hang")


def rule(patience: str) -> Invariant:
    hypothesis = Hypothesis.of("agree", what="turn", patience=patience)
    support = Support(passed=99, excluded=0, runs=2, programs=2)
    return Invariant(invariant_id(hypothesis, ALWAYS), hypothesis, ALWAYS, support, RELATION.say(hypothesis), RELATION.severity)


def seen(out: Path, patience: str, hang_after_s: float = math.inf) -> list[str]:
    trace = Trace.load([out])
    trace.hang_after_s = hang_after_s
    result = check(trace, [Pack([rule(patience)])], relations={"agree": RELATION})
    return [e.what for v in result.violations for e in v.evidence]


def test_ranks_that_wait_for_each_other_are_reported_live_and_after_the_kill(tmp_path: Path) -> None:
    with running(tmp_path, "elsewhere") as out:
        wait_for(out, 3.5, ranks=2)
        live = seen(out, "60")
    dead = seen(out, "60")
    for report in (live, dead):
        (text,) = [t for t in report if t.startswith("rank 1 stopped issuing")]
        assert "after call 8 of the group (all_reduce at" in text
        assert "step 3) and waits in another one at" in text
        assert "rank 0 waits in all_reduce at" in text


def test_a_rank_that_sleeps_is_reported_when_patience_is_over_and_not_before(tmp_path: Path) -> None:
    with running(tmp_path, "asleep") as out:
        wait_for(out, 4.5, ranks=1)
        assert seen(out, "60") == []
        (asked,) = seen(out, "60", hang_after_s=2.0)  # --hang-after
        assert asked.startswith("rank 1 stopped issuing")
    (text,) = seen(out, "4")
    assert text.startswith("rank 1 stopped issuing collectives after call 8")
    assert "train.py:6 for" in text


@pytest.mark.parametrize("kind", ["clean"])
def test_a_clean_job_is_quiet(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, kind) as out:
        deadline = time.monotonic() + 600
        done: list[dict[str, object]] = []
        while len(done) < 2 and time.monotonic() < deadline:
            assert not out.exists() or not (out / "run.json").exists() or seen(out, "4") == []
            done = [f for p in out.glob("procs/*/process.json") if (f := json.loads(p.read_bytes())).get("finished")]
            time.sleep(0.5)
    trace = Trace.load([out])
    found = RELATION.propose(trace)
    assert {h.text("what") for h in found} >= {"function", "arguments", "tensor", "step", "caller", "result", "count", "turn"}
    assert RELATION.examples(trace, found).frame["passed"].all()
