"""What a verifier costs the job: step times with one that works, one that is stopped, and one whose disk is full, against none.

    python benchmarks/watch_cost.py [--rounds 8] [--iters 400] [--script PATH] [-i PACK…] [-- OPTION OF THE PROGRAM…]

Every round runs the program under each condition, in an order of its own, with the same recording (what the packs need), so that the
ratios are those of the stream and the verifier; `record` is without them, `capsules` keeps the last steps, too. `stopped`: SIGSTOP as
soon as it listens, so that its socket and the ring fill. `full`: the run directory is a tmpfs of 4 MiB (needs root; left out without).
Printed is the ratio of median step times: its median over rounds, and its mean with the standard error (two processes that do the same
differ by some hundredths, so a few rounds say little); and whether the losses were the same bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
DRIVER = """
import json, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
times = []
register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
steps = sorted(b - a for a, b in zip(times[40:], times[41:]))
print("STEP " + json.dumps(steps[len(steps) // 2]))
"""


def measure(condition: str, work: Path, number: int, args: argparse.Namespace) -> tuple[float, list[float]]:
    """Median step time in seconds, and the losses."""
    run = work / f"{condition}-{number}"
    mounted = condition == "full"
    if mounted:
        run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run)], check=True)
    packs = [word for pack in args.packs for word in ("-i", str(pack))]
    select = [word for pack in args.packs for word in ("--select", str(pack))]
    how = ["record", *select] if condition == "record" else ["watch", *packs]
    if condition not in ("record", "capsules"):
        how.append("--no-capsules")
    program = [sys.executable, str(work / "driver.py"), str(args.script), "--iters", str(args.iters), *args.options]
    job = subprocess.Popen(
        [sys.executable, "-m", "proctor.cli", *how, "-o", str(run), "--", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    stopped = 0
    if condition == "stopped":
        while not (run / "verify" / "live" / "socket").exists() and job.poll() is None:
            time.sleep(0.02)
        stopped = verifier_of(run)
        os.kill(stopped, signal.SIGSTOP)
    out, _ = job.communicate()
    if stopped:
        os.kill(stopped, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while verifier_of(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    if mounted:
        subprocess.run(["umount", "-l", str(run)], check=True)
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in out.splitlines() if line.startswith(("RESULT ", "STEP "))}
    return float(lines["STEP"]), json.loads(lines["RESULT"])["losses"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iters", type=int, default=400)
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "transformer_lm.py")
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, default=[ROOT / "invariants/packs/torch.json"])
    parser.add_argument("options", nargs="*", help="of the program, after --: `-- --width 256` makes longer steps")
    args = parser.parse_args()
    conditions = ["record", "watch", "capsules", "stopped", *(["full"] if os.geteuid() == 0 else [])]
    ratios: dict[str, list[float]] = defaultdict(list)
    same = True
    shuffler = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="proctor-cost-") as folder:
        work = Path(folder)
        (work / "driver.py").write_text(DRIVER)
        for number in range(args.rounds):
            order = shuffler.sample(conditions, len(conditions))
            found = {condition: measure(condition, work, number, args) for condition in order}
            base, losses = found["record"]
            for condition, (seconds, those) in found.items():
                ratios[condition].append(seconds / base)
                same &= those == losses
            print(f"round {number}: record {1e3 * base:.1f} ms a step; " + ", ".join(f"{c} {found[c][0] / base:.3f}" for c in conditions[1:]), flush=True)
    for condition in conditions[1:]:
        of = ratios[condition]
        error = statistics.stdev(of) / len(of) ** 0.5 if len(of) > 1 else float("nan")
        print(f"{condition:8} step time ÷ without a verifier: {statistics.median(of):.3f} (mean {statistics.mean(of):.3f} ± {error:.3f})")
    print("losses: the same bit for bit" if same else "losses DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
