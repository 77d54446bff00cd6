"""How soon a violation is known: from the end of the step in which replicas part to the verdict, in milliseconds.

    python benchmarks/latency.py [--iters 500] [--every 10] [--ranks 2] [--pause 0.02] [--full] [-i PACK…]

Runs the DDP language model on some ranks and a verifier in this process, as `proctor watch` has it beside the job. After the
update of every tenth step one parameter of rank 1 is changed, and set right after the next one, so that each time a
violation comes after healthy steps. Counted is, for each of these steps, the first rule that is known to be violated. Ranks and
verifier share the cores of this machine; with `--pause` ranks wait for so long in each step, as for an accelerator, and leave some free.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["POLARS_MAX_THREADS"] = "1"  # as a verifier has; polars looks when it is imported
from proctor.cli._parts.needs import needs_of
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run, write_boot
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.wire.peer import make_token
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.service.verifier import Verifier
from proctor.verify.transport.inbox import Inbox
from proctor.verify.transport.server import Server
from proctor.verify.view.events import EventLog

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import os, runpy, sys, time
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
seen = [0]
def part(optimizer, args, kwargs):
    seen[0] += 1
    time.sleep({pause})
    parameter = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        if seen[0] > 40 and seen[0] % {every} == 0 and os.environ["RANK"] == "1":
            parameter.add_(1e-3)
        if seen[0] > 40 and seen[0] % {every} == 1:
            whole = parameter.detach().clone()
            dist.broadcast(whole, 0)
            parameter.copy_(whole)
register_optimizer_step_post_hook(part)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Watcher(Verifier):
    """Keeps how late the first violation of each step was known."""

    known: dict[int, float]
    every: int
    last: int

    def _latency(self, trace: Trace, step: int | None) -> float:
        seconds = super()._latency(trace, step)
        if step is not None and 40 <= step < self.last and (step + 1) % self.every == 0 and seconds > 0:
            self.known.setdefault(step, seconds)
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iters", default="400")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds")
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "ddp_accumulate_lm.py")
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path)
    parser.add_argument("--full", action="store_true", help="record everything")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="proctor-latency-"))
    shipped = ROOT / "invariants" / "packs"
    paths = args.packs or [shipped / "torch.json", shipped / "distributed.json"]
    packs = [read_pack(path, list(registry())) for path in paths]
    driver, run = work / "driver.py", work / "run"
    driver.write_text(DRIVER.format(every=args.every, pause=args.pause))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), str(driver), str(args.script), "--iters", args.iters]
    create_run(run, command, overwrite=False)
    address = f"unix:{work / 'live' / 'socket'}"
    chosen = {} if args.full else needs_of(paths)
    boot = write_boot(run, RecordConfig(run=str(run), stream=address, token_file=str(work / "token"), **chosen))
    inbox, token = Inbox(), make_token(work / "token")
    environment = {**os.environ, "PYTHONPATH": str(boot), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    os.nice(10)
    with Server([address], token, inbox):
        verifier = Watcher(run, packs, inbox, IncidentBook("latency", "here"), EventLog(run))
        known: dict[int, float] = {}
        verifier.known, verifier.every, verifier.last = known, args.every, int(args.iters) - 1  # nothing follows the last step
        verifier.going = lambda: job.poll() is None
        begin = time.monotonic()
        cpu = time.process_time()
        while not verifier._over():
            verifier.turn()
        steps = verifier._checker.judged + 1
        wall, cpu = time.monotonic() - begin, time.process_time() - cpu
        verifier.close()
    late = [1e3 * seconds for _, seconds in sorted(known.items())]
    if len(late) < 2:
        print("no violation was found")
        return 1
    cuts = statistics.quantiles(late, n=100, method="inclusive")
    print(f"{steps} steps in {wall:.1f} s, {1e3 * wall / steps:.0f} ms a step; verifier {100 * cpu / wall:.0f} % of a core")
    print(f"{len(late)} steps with a violation: p50 {cuts[49]:.0f} ms, p90 {cuts[89]:.0f} ms, p99 {cuts[98]:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
