"""Ranks that are processes of their own, as many as the machine's memory holds, with one verifier beside them.

    python benchmarks/real_ranks.py [--ranks 64] [--steps 40] [--pause 2] [--width 256] [-- OPTION OF WATCH…]

A small DDP model on gloo, started by torchrun, twice: bare, and under `proctor watch`. Ranks sleep in each step, as they would wait for an accelerator, since many share few
cores here. After some steps one rank's replica parts. Printed are the memory that each rank has to itself (median and largest of the ranks; what processes share is not counted), CPU seconds of a rank's
steps, and the verifier's memory and CPU; how many ranks it heard of and how many records it lost; and how long after the update in which the replica parted
it was told, by which rule and of which rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.watching import verifier_of
from own_memory import own_mib

PROGRAM = """
import json, os, resource, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
sys.path.append({folder!r})
from own_memory import own_mib

out, steps, pause, width, part_at = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
noise = torch.Generator().manual_seed(rank)
parted, begin = 0.0, 0.0
for step in range(steps):
    x = torch.randn(32, width, generator=noise)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    if step == part_at and rank == ranks // 2 + 1:
        parted = time.time()
        with torch.no_grad():
            model.module[2].weight[3, 3] += 1e-3
    if step == 4:
        begin = time.process_time()
    time.sleep(pause)
mib = own_mib()
with open(f"{out}/{rank}.json", "w") as file:
    json.dump({"mib": mib, "cpu_s": time.process_time() - begin, "parted": parted, "rank": rank}, file)
dist.barrier()
dist.destroy_process_group()
"""


def job(folder: Path, args: argparse.Namespace) -> list[str]:
    """The command, which leaves a file of each rank in the folder."""
    folder.mkdir()
    program = folder.parent / "program.py"
    program.write_text(PROGRAM.replace("{folder!r}", repr(str(Path(__file__).resolve().parent))))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    return [*torchrun, str(program), *map(str, (folder, args.steps, args.pause, args.width, args.steps // 2))]


def ranks_of(folder: Path, wanted: int) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(found) != wanted:
        raise SystemExit(f"{len(found)} of {wanted} ranks reached the end")
    return sorted(found, key=lambda one: one["rank"])


def cost_of(pid: int) -> tuple[float, float]:
    """MiB that a process has to itself, and its CPU seconds."""
    mib = own_mib(pid)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return mib, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watched(command: list[str], run: Path, options: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Largest memory and last CPU seconds of the verifier, and what `watch` said."""
    watch = [sys.executable, "-m", "proctor.cli", "watch", "--fail-on", "never", "-o", str(run), *options, "--", *command]
    with subprocess.Popen(watch, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        most = cpu = 0.0
        while process.poll() is None:
            time.sleep(1)
            pid = verifier_of(run)
            try:
                mib, cpu = cost_of(pid) if pid else (0.0, cpu)
            except OSError:
                continue
            most = max(most, mib)
        said = process.stderr.read() if process.stderr else ""
    return most, cpu, said


def show(name: str, ranks: list[dict[str, Any]]) -> None:
    mib, cpu = [one["mib"] for one in ranks], [one["cpu_s"] for one in ranks]
    print(f"{name}: {statistics.median(mib):.0f} MiB a rank (largest {max(mib):.0f}), {statistics.median(cpu):.2f} CPU seconds of its steps (largest {max(cpu):.2f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds of each step that a rank sleeps")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("options", nargs="*", help="of watch, after --")
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="proctor-ranks-") as work:
        folder, run = Path(work), Path(work) / "run"
        subprocess.run(job(folder / "bare", args), env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        bare = ranks_of(folder / "bare", args.ranks)
        most, cpu, said = watched(job(folder / "with", args), run, args.options, environment)
        ranks = ranks_of(folder / "with", args.ranks)
        verdict = json.loads((run / "verify" / "verdict.json").read_text())
        events = [json.loads(line) for line in (run / "verify" / "events.jsonl").read_text().splitlines()]
    parted = max(one["parted"] for one in ranks)
    told = [e for e in events if e["kind"] == "incident" and e["time"] > parted]
    heard = max((e["data"].get("ranks", 0) for e in events if e["kind"] == "step"), default=0)
    show("bare", bare)
    show("watched", ranks)
    print(f"verifier: {most:.0f} MiB at most, {cpu:.1f} CPU seconds in all; it heard of {heard} ranks, judged {verdict['steps']} steps, lost {verdict['lost'] or 'nothing'}")
    print(f"told {1e3 * (told[0]['time'] - parted):.0f} ms after the replica parted: {told[0]['data']['title']}" if told else f"the replica that parted was not told\n{said}")
    return 0 if told and heard == args.ranks else 1


if __name__ == "__main__":
    sys.exit(main())
