"""What a verifier costs the job: step times with one that works, one that is stopped, and one whose disk is full, against none.

    python benchmarks/watch_cost.py [--rounds 8] [--iters 400] [--only cut …] [--script PATH] [-i PACK…] [-- OPTION OF THE PROGRAM…]

Every round runs the program under each condition, in an order of its own, with the same recording (what the packs need), so that the
ratios are those of the stream and the verifier; `record` is without them, `capsules` keeps the last steps, too. `stopped`: SIGSTOP as
soon as it listens, so that its socket and the ring fill. `full`: the run directory is a tmpfs of 4 MiB. `cut`: the verifier is on
another host (a network namespace), and the link to it is cut when it has judged a step. `clock`: the time of day jumps by days every
half second, against `still`: recording with the same library in front of the clock. (`full` and `cut` need root and are left out without.)
Printed is the ratio of median step times: its median over rounds, and its mean with the standard error (two processes that do the same
differ by some hundredths, so a few rounds say little); and whether the losses were the same bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.clock import Clock
from helpers.network import THERE, link, other_host
from helpers.watching import PROCTOR, verifier_of

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
    packs = [word for pack in args.packs for word in ("-i", str(pack))]
    select = [word for pack in args.packs for word in ("--select", str(pack))]
    how = ["record", *select] if condition in BASES else ["watch", *packs]
    if condition not in (*BASES, "capsules"):
        how.append("--no-capsules")
    with AROUND.get(condition, plainly)(run, packs) as around:
        program = [sys.executable, str(work / "driver.py"), str(args.script), "--iters", str(args.iters), *args.options]
        job = subprocess.Popen(
            [*PROCTOR, *how, *around.options, "-o", str(run), "--", *program],
            env={**os.environ, "OMP_NUM_THREADS": "1", **around.environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        around.begun(job)
        out, _ = job.communicate()
        around.over()
        deadline = time.monotonic() + 60
        while verifier_of(run) and time.monotonic() < deadline:
            time.sleep(0.2)
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in out.splitlines() if line.startswith(("RESULT ", "STEP "))}
    return float(lines["STEP"]), json.loads(lines["RESULT"])["losses"]


@dataclass
class Around:
    """What is different about a condition.

    Attributes:
        options: of the command.
        environment: of the job.
        begun, over: done when the job has begun, and when it is over.
    """

    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    begun: Callable[[subprocess.Popen[str]], None] = lambda job: None
    over: Callable[[], None] = lambda: None


@contextmanager
def plainly(run: Path, packs: list[str]) -> Iterator[Around]:
    yield Around()


@contextmanager
def stopped(run: Path, packs: list[str]) -> Iterator[Around]:
    """A verifier that is stopped as soon as it listens."""
    pids: list[int] = []

    def stop(job: subprocess.Popen[str]) -> None:
        while not (run / "verify" / "live" / "socket").exists() and job.poll() is None:
            time.sleep(0.02)
        pids.append(verifier_of(run))
        os.kill(pids[0], signal.SIGSTOP)

    yield Around(begun=stop, over=lambda: os.kill(pids[0], signal.SIGCONT))


@contextmanager
def full(run: Path, packs: list[str]) -> Iterator[Around]:
    """A run directory with little room."""
    run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run)], check=True)
    try:
        yield Around()
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)


@contextmanager
def cut(run: Path, packs: list[str]) -> Iterator[Around]:
    """A verifier on another host, to which the link is cut."""
    there, token = run.with_name(f"{run.name}-there"), run.with_name(f"{run.name}-token")
    events = there / "verify" / "events.jsonl"
    with other_host() as name:
        serve = [*PROCTOR, "verify", str(there), "--listen", f"tcp:{THERE}:7077", "--token-file", str(token), *packs]
        verifier = subprocess.Popen(["ip", "netns", "exec", name, *serve], stderr=subprocess.DEVNULL)

        def judged() -> bool:
            return events.exists() and b'"step"' in events.read_bytes()

        def cut_off(job: subprocess.Popen[str]) -> None:
            while not judged() and job.poll() is None:
                time.sleep(0.02)
            link(name, up=False)

        try:
            while not token.exists() and verifier.poll() is None:
                time.sleep(0.02)
            yield Around(options=["--verifier", f"{THERE}:7077", "--token-file", str(token)], begun=cut_off)
        finally:
            verifier.kill()
            verifier.wait()


@contextmanager
def still(run: Path, packs: list[str]) -> Iterator[Around]:
    """A library in front of the clock, which does not jump."""
    folder = run.with_name(f"{run.name}-clock")
    folder.mkdir()
    yield Around(environment=Clock(folder).environment)


@contextmanager
def clock(run: Path, packs: list[str]) -> Iterator[Around]:
    """A time of day that jumps."""
    folder = run.with_name(f"{run.name}-clock")
    folder.mkdir()
    it, end = Clock(folder), threading.Event()

    def jump() -> None:
        for days in itertools.cycle((1, -2, 90, -30)):
            if end.wait(0.5):
                return
            it.jump(86_400 * days)

    threading.Thread(target=jump, daemon=True).start()
    yield Around(environment=it.environment, over=end.set)


AROUND = {"stopped": stopped, "full": full, "cut": cut, "clock": clock, "still": still}
BASES = ("record", "still")
NEED_ROOT = ("full", "cut")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iters", type=int, default=400)
    parser.add_argument("--only", nargs="+", choices=["watch", "capsules", "stopped", "full", "cut", "clock"], help="these conditions")
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "transformer_lm.py")
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, default=[ROOT / "invariants/packs/torch.json"])
    parser.add_argument("options", nargs="*", help="of the program, after --: `-- --width 256` makes longer steps")
    args = parser.parse_args()
    able = [name for name in AROUND if name not in BASES and (os.geteuid() == 0 or name not in NEED_ROOT)]
    asked = args.only or ["watch", "capsules", *able]
    conditions = ["record", *asked, *(["still"] if "clock" in asked else [])]
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
            same &= all(those == losses for _, those in found.values())
            for condition in asked:
                ratios[condition].append(found[condition][0] / (found["still"][0] if condition == "clock" else base))
            print(f"round {number}: record {1e3 * base:.1f} ms a step; " + ", ".join(f"{c} {ratios[c][-1]:.3f}" for c in asked), flush=True)
    for condition in asked:
        of = ratios[condition]
        error = statistics.stdev(of) / len(of) ** 0.5 if len(of) > 1 else float("nan")
        print(f"{condition:8} step time ÷ without a verifier: {statistics.median(of):.3f} (mean {statistics.mean(of):.3f} ± {error:.3f})")
    print("losses: the same bit for bit" if same else "losses DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
