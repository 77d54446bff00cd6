"""A program that looks at its threads finds those that it would find alone; a fork and an exit meet none of ours either."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.live.watching import PROCTOR

pytest.importorskip("torch")

PROGRAM = """
import json, os, sys, threading, time, torch
from torch import nn

def known():
    return sorted(thread.name for thread in threading.enumerate())

model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, seen = known(), []
for step in range(12):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    seen += known()
    if step == 5:
        print("said to a stream of the program's", file=sys.stderr)
        if KEPT:
            from proctor.instrument import attach
            attach._observer.capsules.freeze("found by a test", step)
time.sleep(1.5)  # the writer has written, the sender has sent and heard
child = os.fork()
if child == 0:
    os._exit(0 if known() == before else 3)
forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
running = 0
if "proctor.instrument.attach" in sys.modules:
    from proctor.instrument import attach
    threads = attach._observer.writer.threads
    if KEPT:
        threads.append(attach._observer.capsules.writer._thread)
    running = sum(thread.is_alive() and thread.ident in sys._current_frames() for thread in threads)
print("SEEN", json.dumps({"before": before, "seen": sorted({*seen, *known()}), "active": threading.active_count(), "forked": forked, "running": running}))
"""


def seen_by(command: list[str]) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SEEN "))
    found: dict[str, object] = json.loads(line.removeprefix("SEEN "))
    return found


@pytest.mark.parametrize(("way", "ours"), [(["record"], 1), (["watch", "--fail-on", "never"], 3)], ids=["recorded", "watched"])
def test_a_program_sees_none_of_our_threads(tmp_path: Path, way: list[str], ours: int) -> None:
    """The writer's; under `watch` also the sender's and that of capsules. They run beside the program nevertheless."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("KEPT", "False"))
    alone = seen_by([*PROCTOR[:1], str(script)])
    script.write_text(PROGRAM.replace("KEPT", str(ours == 3)))
    attached = seen_by([*PROCTOR, *way, "-o", str(tmp_path / "run"), "--", *PROCTOR[:1], str(script)])
    assert attached["seen"] == attached["before"] == alone["seen"] == ["MainThread"]
    assert attached["active"] == 1 and attached["forked"] == 0
    assert (alone["running"], attached["running"]) == (0, ours)
    assert ours == 1 or list((tmp_path / "run" / "capsules").iterdir()), "a step that was asked for was kept"
