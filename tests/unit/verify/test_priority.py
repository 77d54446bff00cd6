"""`verify._priority`: a verifier's threads give way to the job's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
from proctor.verify._priority import step_back
def told():
    print(os.sched_getscheduler(0) == os.SCHED_BATCH, os.getpriority(os.PRIO_PROCESS, 0))
step_back()
told()
thread = threading.Thread(target=told)
thread.start(); thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a system without this policy")
def test_the_caller_and_its_later_threads_give_way() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"True {min(before + 10, 19)}"] * 2


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from proctor.verify import _priority

    def forbidden(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden, raising=False)
    _priority.step_back()
