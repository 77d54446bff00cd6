"""A copy of a process that has a process group."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import sys, tempfile, torch, torch.distributed as dist
from torch.distributed import all_reduce
from proctor.oracle.selfcheck import Unknown
from proctor.oracle.selfcheck.watching.fork import in_copy

dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)

def tried():
    said = []
    for call in (all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather([torch.zeros(2)], t), lambda _: dist.barrier()):
        try:
            call(torch.ones(2))
            said.append("went through")
        except Unknown as e:
            said.append(str(e))
    return "|".join(said).encode()

made, why = in_copy(tried, 20.0)
t = torch.ones(2)
all_reduce(t)  # the process itself still has them
print(made.decode() or why)
"""


def test_collectives_raise_in_a_copy_at_once_and_stay_in_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    said = done.stdout.strip().split("|")
    assert len(said) == 4 and all("communicates with other ranks" in one for one in said), done.stdout
