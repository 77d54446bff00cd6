"""The program that faults happen to: a small regression that tells its losses and its last parameters, bit for bit.

Code of a fault is put into it at four places. At step `GATE` it may wait for somebody outside (`--gate FOLDER`), so that a fault happens at
the same step with and without Proctor. `--bug` plants one: gradients are not cleared from step 14 on.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

GATE: Final = 10
STEPS: Final = 26
_PROGRAM: Final = '''
import argparse, hashlib, os, pathlib, signal, struct, sys, threading, time
options = argparse.ArgumentParser()
options.add_argument("--bug", action="store_true")
options.add_argument("--gate", default="")
options.add_argument("--steps", type=int, default={steps})
options = options.parse_args()
RUN = os.environ.get("FAULT_RUN", "")  # where the run directory is; without Proctor there is none
{start}
import torch
import torch.distributed as dist
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
LOCK = threading.Lock()
torch.set_num_threads(1)
if WORLD > 1:
    # The addresses of an earlier life stay in torchrun's store, and a rank that reads one too soon fails, without Proctor, too: each life has keys of its own.
    store = dist.PrefixStore("life-" + str(LIFE), next(dist.rendezvous("env://"))[0])
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x)


def bits(number):
    return struct.pack("<f", number).hex()


def gate():
    place = pathlib.Path(options.gate)
    (place / f"at-{{RANK}}-{{LIFE}}").write_text(str(os.getpid()))
    until = time.monotonic() + 200
    while not (place / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)


def train(steps=options.steps, at_gate=None, out=print, rank=RANK):
    with LOCK:  # the generator is that of all threads
        torch.manual_seed(0)
        net = Net()
    model = torch.nn.parallel.DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    noise = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if not (options.bug and step >= 14):
            optimizer.zero_grad()
        loss = model(torch.randn(16, 4, generator=noise)).square().mean()
        loss.backward()
        optimizer.step()
        if step == {gate} and at_gate is not None:
            at_gate()
        if RANK == 0:
            out(f"step {{step}} {{bits(loss.item())}}", flush=True)
        time.sleep(0.01)
    told = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    if RANK == 0:
        out(f"parameters {{told}}", flush=True)
    return told


def at_gate():
    if options.gate:
        gate()
{middle}
    return None

{before}
{how}
{end}
if WORLD > 1:
    dist.barrier()
    dist.destroy_process_group()
'''


def write(path: Path, *, start: str = "", middle: str = "", before: str = "", how: str = "train(at_gate=at_gate)", end: str = "") -> None:
    """Write the program.

    Args:
        path: where.
        start: runs before torch is imported; `middle` within step `GATE`; `before` ahead of training; `end` after it.
        how: the call that trains.
    """
    parts = {"start": start, "before": before, "how": how, "end": end}
    text = _PROGRAM.format(steps=STEPS, gate=GATE, middle=textwrap.indent(textwrap.dedent(middle), "    "), **{k: textwrap.dedent(v) for k, v in parts.items()})
    path.write_text(text)
