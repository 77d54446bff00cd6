"""Runs something in a process of its own that may fork ranks: pytest's has threads."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

from helpers.warm import python

TIMEOUT_S = 600

PREAMBLE = """
import os, sys, time, signal
from pathlib import Path
from proctor.oracle.fuzz.running.warm import warm_up
from proctor.oracle.fuzz.running.worlds import Worlds
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.program import compiled
from proctor.oracle.fuzz.spec import Scenario
import torch
torch.set_num_threads(1)

def ddp_sums():
    # The hook that DDP calls sums where it should average: to be planted in a rank.
    import torch.nn.parallel.distributed as ddp
    plain = ddp.DistributedDataParallel.__init__
    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        for p in self.module.parameters():
            if p.requires_grad:
                p.register_hook(lambda g: g * self.process_group.size())
    ddp.DistributedDataParallel.__init__ = init
"""


def alone(body: str, folder: Path, *, timeout_s: float = TIMEOUT_S) -> str:
    """Run lines after the preamble; returns what they print, fails with it where they raise."""
    file = folder / "alone.py"
    file.write_text(PREAMBLE + textwrap.dedent(body))
    done = subprocess.run(
        [python(), str(file)], capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def leftovers(session: str) -> list[int]:
    """Processes that still carry a word in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"FUZZ_SESSION={session}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found
