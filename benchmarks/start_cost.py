"""What a whole short job costs more under `watch`: attaching, importing, the verifier's start, judging and the final check.

    python benchmarks/start_cost.py [--rounds 5] [--only lm ddp] [--iters N] [--json FILE]

Each round runs the program bare and under `proctor watch --fail-on never`, one right after the other and in changing order, and counts the
CPU seconds of all processes (`wait4`: launcher, ranks, verifier, its keeper) and the wall clock until everything has ended, the verdict
included. Printed is the median of the rounds' differences, with the least and the most. Python's byte code is cached in a folder of
the benchmark's, as an installed package has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
JOBS = {
    "lm": ([PYTHON, str(EXAMPLES / "transformer_lm.py"), "--iters"], 600),
    "ddp": ([*TORCHRUN, str(EXAMPLES / "ddp_classifier.py"), "--iters"], 150),
}


def measure(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU seconds of all processes, and wall seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--iters", type=int)
    parser.add_argument("--options", nargs="*", default=[], help="of watch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="proctor-start-") as folder:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
        for name in args.only:
            program, iters = JOBS[name]
            bare = [*program, str(args.iters or iters)]
            watched = [PYTHON, "-m", "proctor.cli", "watch", "--overwrite", "--fail-on", "never", *args.options, "-o", f"{folder}/run", "--", *bare]
            measure(watched, environment)  # fills the caches
            pairs = []
            for number in range(args.rounds):
                both = [(True, watched), (False, bare)]
                found = {on: measure(command, environment) for on, command in (both if number % 2 else both[::-1])}
                pairs.append((found[False], found[True]))
                print(f"{name} {number}: bare {found[False][0]:.2f} s CPU, watched {found[True][0]:.2f}", file=sys.stderr, flush=True)
            row: dict[str, object] = {"job": name}
            for column, what in enumerate(("cpu", "wall")):
                more = [b[column] - a[column] for a, b in pairs]
                row[f"{what}_bare_s"] = statistics.median(a[column] for a, _ in pairs)
                row[f"{what}_more_s"] = statistics.median(more)
                row[f"{what}_range_s"] = [min(more), max(more)]
                print(
                    f"{name:5} {what:4} bare {row[f'{what}_bare_s']:6.2f} s, watched {statistics.median(more):+.2f} s"
                    f" ({min(more):+.2f} to {max(more):+.2f} in {args.rounds} rounds)", flush=True,
                )  # fmt: skip
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
