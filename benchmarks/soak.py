"""Does anything grow? A job at full speed under `proctor watch`, with the memory of its ranks and its verifier looked at.

    python benchmarks/soak.py [--minutes 30] [--script PATH] [--json FILE]

Runs a two-rank program for as long as asked, with 10⁹ iterations to do, and ends it with SIGTERM. Memory is VmRSS, taken every five
seconds; the trace on disk grows by design. Printed are the medians of each fifth of the time after the first one, in which tables,
caches and the allocator fill.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.watching import verifier_of

ROOT = Path(__file__).resolve().parent.parent
PARTS = 5


def processes(run: Path) -> dict[int, str]:
    """Verifier and ranks of a run by process id."""
    ranks = {int(p.name.rpartition("-")[2]): f"rank {p.name.partition('-')[0]}" for p in (run / "procs").glob("*-*")}
    found = {pid: name for pid, name in ranks.items() if Path(f"/proc/{pid}").exists()}
    judge = verifier_of(run)
    return {**found, judge: "verifier"} if judge else found


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "ddp_accumulate_lm.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proctor-soak-") as work:
        run = Path(work) / "run"
        command = [sys.executable, "-m", "proctor.cli", "watch", "-o", str(run), "--", sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", "2", str(args.script), "--iters", "1000000000"]
        job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        begin = time.monotonic()
        samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        while time.monotonic() - begin < 60 * args.minutes and job.poll() is None:
            time.sleep(5)
            for pid, name in processes(run).items():
                try:
                    samples[name].append(((time.monotonic() - begin) / 60, rss_mib(pid)))
                except OSError:
                    continue
        job.send_signal(signal.SIGTERM)
        job.wait(60)
        events = (run / "verify" / "events.jsonl").read_text().splitlines()
        last = next((e["data"] for e in map(json.loads, reversed(events)) if e["kind"] == "step"), {})
        size = sum(f.stat().st_size for f in run.rglob("*") if f.is_file()) / 2**20
        deadline = time.monotonic() + 90
        while any(name == "verifier" for name in processes(run).values()) and time.monotonic() < deadline:
            time.sleep(1)
    print(f"{args.minutes:g} minutes, {last.get('step', -1) + 1} steps judged of {last.get('ahead', -1)}, {size:.0f} MiB on disk")
    table = {}
    for name, points in sorted(samples.items()):
        parts = [[m for t, m in points if i <= PARTS * t / args.minutes < i + 1] for i in range(PARTS)]
        medians = [statistics.median(p) for p in parts if p]
        table[name] = medians
        print(f"{name:10} RSS, MiB, by fifths: " + ", ".join(f"{m:.0f}" for m in medians))
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "last": last}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
