"""Does anything grow? A job at full speed under `proctor watch`, with the memory of its ranks and its verifier looked at.

    python benchmarks/soak.py [--minutes 30] [--script PATH] [--bare] [--one] [--json FILE] [-- OPTION OF WATCH…]

Runs a two-rank program (`--one`: one of one rank) for as long as asked, with 10⁹ iterations to do, and ends it with SIGTERM. Memory is VmRSS,
taken every five seconds, with the numbers of threads and of open descriptors; the trace on disk grows by design. Printed are the medians of each
fifth of the time after the first one, in which tables, caches and the allocator fill. With `--bare` the same job runs without us as well: what a rank grows by itself is not ours.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.watching import verifier_of

ROOT = Path(__file__).resolve().parent.parent
PARTS = 5


Look = Callable[[], dict[int, str]]
Samples = dict[str, list[tuple[float, float, int, int]]]  # minutes, MiB, threads, descriptors


def watched(run: Path) -> dict[int, str]:
    """Verifier and ranks of a run by process id."""
    ranks = {int(p.name.rpartition("-")[2]): f"rank {p.name.partition('-')[0]}" for p in (run / "procs").glob("*-*")}
    found = {pid: name for pid, name in ranks.items() if Path(f"/proc/{pid}").exists()}
    judge = verifier_of(run)
    return {**found, judge: "verifier"} if judge else found


def children(launcher: int) -> dict[int, str]:
    """Ranks that a launcher has started, by process id."""
    found = (int(pid) for path in Path(f"/proc/{launcher}/task").glob("*/children") for pid in path.read_text().split())
    return {pid: f"rank {number} without us" for number, pid in enumerate(sorted(found))}


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def disk_mib(run: Path) -> float:
    return sum(f.stat().st_size for f in run.rglob("*") if f.is_file()) / 2**20


def sample(job: subprocess.Popen[bytes], minutes: float, look: Look) -> Samples:
    """Memory by process and time in minutes, until the time is over; then the job is ended."""
    begin = time.monotonic()
    samples: Samples = defaultdict(list)
    while time.monotonic() - begin < 60 * minutes and job.poll() is None:
        time.sleep(5)
        for pid, name in look().items():
            try:
                samples[name].append(((time.monotonic() - begin) / 60, rss_mib(pid), threads(pid), descriptors(pid)))
            except OSError:
                continue
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    return samples


def show(samples: Samples, minutes: float) -> None:
    for name, points in sorted(samples.items()):
        for column, what in ((1, "RSS, MiB"), (2, "threads"), (3, "descriptors")):
            parts = [[point[column] for point in points if i <= PARTS * point[0] / minutes < i + 1] for i in range(PARTS)]
            print(f"{name:17} {what}, by fifths: " + ", ".join(f"{statistics.median(p):.0f}" for p in parts if p))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "ddp_accumulate_lm.py")
    parser.add_argument("--bare", action="store_true", help="then the same job without us, for as long")
    parser.add_argument("--one", action="store_true", help="one rank, without torchrun")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of watch, after --")
    args = parser.parse_args()
    launcher = [] if args.one else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program = [sys.executable, *launcher, str(args.script), "--iters", "1000000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="proctor-soak-") as work:
        run = Path(work) / "run"
        command = [sys.executable, "-m", "proctor.cli", "watch", "-o", str(run), *args.options, "--", *program]
        job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        samples = sample(job, args.minutes, lambda: watched(run))
        events = (run / "verify" / "events.jsonl").read_text().splitlines()
        last = next((e["data"] for e in map(json.loads, reversed(events)) if e["kind"] == "step"), {})
        size = disk_mib(run)
        deadline = time.monotonic() + 90
        while any(name == "verifier" for name in watched(run).values()) and time.monotonic() < deadline:
            time.sleep(1)
    print(f"{args.minutes:g} minutes, {last.get('step', -1) + 1} steps judged of {last.get('ahead', -1)}, {size:.0f} MiB on disk")
    if args.bare:
        bare = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        samples |= sample(bare, args.minutes, lambda: children(bare.pid))
    show(samples, args.minutes)
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "last": last}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
