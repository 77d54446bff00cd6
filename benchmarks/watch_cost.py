"""What a verifier costs the job: step times with one that works, one that is stopped, and one whose disk is full, against none.

    python benchmarks/watch_cost.py [--rounds 3] [--iters 1600] [--only cut …] [--script PATH] [-i PACK…] [-- OPTION OF THE PROGRAM…]

The program runs under `proctor watch` in each condition. A machine is faster at one moment than at the next, and two processes that do
the same differ by some hundredths, so a run is held against itself: for every other turn of some steps the stream to the verifier is taken
away, and the process records as it does without one. A turn begins when the machine is idle, that is when the verifier has judged the
last; its first steps, which find the caches cold, do not count. Printed is the ratio of a turn's median step to that of its neighbours: its
median and its mean with the standard error; and whether the losses were those of a run that is recorded only, bit for bit.

Conditions: `watch`; `capsules`, which keeps the last steps, too (every other turn does not); `stopped`: SIGSTOP when the verifier has judged
a step, so that its socket and the ring fill; `full`: the run directory is a tmpfs of 4 MiB; `cut`: the verifier is on another host (a
network namespace), and the link to it is cut; `clock`: the time of day jumps by days in each step, and every other turn is one without
jumps, but with the stream, so that what `watch` costs comes on top. (`full` and `cut` need root and are left out without.) Of the steps of
every other turn the verifier never hears, so it has more to look at than in a whole run.
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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.network import THERE, link, other_host
from helpers.live.watching import PROCTOR, verifier_of
from helpers.system.clock import Clock

ROOT = Path(__file__).resolve().parent.parent
COLD = 2  # steps at the beginning of a turn
DRIVER = """
import json, os, runpy, struct, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from proctor.instrument import attach

FREE, GO, LENGTH = 40, sys.argv[1], int(sys.argv[2])
seen, last, times, turns, on, taken = 0, 0.0, [], [], True, []

def busy():
    return sum(int(n) for n in open("/proc/stat").readline().split()[1:4])

def until_idle(most_s):
    deadline, before = time.monotonic() + most_s, -9
    while time.monotonic() < deadline and (now := busy()) - before > 1:
        before = now
        time.sleep(0.05)

def switch():
    global on
    if "JUMP" in os.environ:
        on = not on
        return
    writer, capsules = attach._observer.writer, attach._observer.capsules
    with writer._lock:
        if on:
            taken[:] = writer._sender, capsules and capsules._live
        on = not on
        writer._sender = taken[0] if on else None
        if capsules is not None:
            capsules._live = taken[1] if on else lambda: False

def stepped(*_):
    global seen, last, times
    times.append(time.perf_counter() - last)
    seen += 1
    if seen == FREE:
        while not os.path.exists(GO):
            time.sleep(0.05)
        until_idle(60)
    if GO != os.devnull and seen >= FREE and (seen - FREE) % LENGTH == 0:
        turns.append(times)
        switch()
        until_idle(2)
        times = []
    if on and "JUMP" in os.environ:
        with open(os.environ["JUMP"], "r+b") as file:
            file.write(struct.pack("<q", 86_400 * (1, -2, 90, -30)[seen % 4]))
    last = time.perf_counter()

register_optimizer_step_post_hook(stepped)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
if not on:
    switch()
print("TURNS " + json.dumps(turns[1:]))  # without the stream, with it, without it …
"""


def measure(condition: str, work: Path, number: int, args: argparse.Namespace) -> tuple[list[list[float]], list[float]]:
    """Seconds of the steps of each turn, the first one without the stream, and the losses."""
    run, go = work / f"{condition}-{number}", work / f"{condition}-{number}-go"
    packs = [word for pack in args.packs for word in ("-i", str(pack))]
    how = ["watch", "--budget", "none", *packs] if condition != "record" else ["record", *(w.replace("-i", "--select") for w in packs)]
    if condition not in ("record", "capsules"):
        how.append("--no-capsules")
    program = [str(work / "driver.py"), os.devnull if condition == "record" else str(go), str(args.turn), str(args.script)]
    with AROUND.get(condition, plainly)(run, packs) as around:
        job = subprocess.Popen(
            [*PROCTOR, *how, *around.options, "-o", str(run), "--", sys.executable, *program, "--iters", str(args.iters), *args.options],
            env={**os.environ, "OMP_NUM_THREADS": "1", **around.environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        if condition != "record":
            until(lambda: judged(around.events or run), job)
            around.begun()
            go.touch()
        out, _ = job.communicate()
        around.over()
        until(lambda: not verifier_of(run), None)
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in out.splitlines() if line.startswith(("RESULT ", "TURNS "))}
    return json.loads(lines["TURNS"]), json.loads(lines["RESULT"])["losses"]


def until(reached: Callable[[], bool], job: subprocess.Popen[str] | None) -> None:
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline and (job is None or job.poll() is None):
        time.sleep(0.05)


def judged(run: Path) -> bool:
    """Whether its verifier has judged a step."""
    events = run / "verify" / "events.jsonl"
    return events.exists() and b'"kind":"step"' in events.read_bytes()


def compared(turns: list[list[float]]) -> list[float]:
    """The median step of each turn with the stream, divided by the mean of those of the two turns around it."""
    middle = [statistics.median(turn[COLD:]) for turn in turns]
    return [2 * middle[i] / (middle[i - 1] + middle[i + 1]) for i in range(1, len(middle) - 1, 2)]


@dataclass
class Around:
    """What is different about a condition.

    Attributes:
        options: of the command.
        environment: of the job.
        events: the run directory of the verifier, where it is another one.
        begun, over: done when the verifier has judged a step, and when the job is over.
    """

    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    events: Path | None = None
    begun: Callable[[], None] = lambda: None
    over: Callable[[], None] = lambda: None


@contextmanager
def plainly(run: Path, packs: list[str]) -> Iterator[Around]:
    yield Around()


@contextmanager
def stopped(run: Path, packs: list[str]) -> Iterator[Around]:
    """A verifier that is stopped."""
    pids: list[int] = []

    def stop() -> None:
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
    with other_host() as name:
        serve = [*PROCTOR, "verify", str(there), "--listen", f"tcp:{THERE}:7077", "--token-file", str(token), *packs]
        verifier = subprocess.Popen(["ip", "netns", "exec", name, *serve], stderr=subprocess.DEVNULL)
        try:
            until(token.exists, None)
            options = ["--verifier", f"{THERE}:7077", "--token-file", str(token)]
            yield Around(options=options, events=there, begun=lambda: link(name, up=False))
        finally:
            verifier.kill()
            verifier.wait()


@contextmanager
def clock(run: Path, packs: list[str]) -> Iterator[Around]:
    """A time of day that jumps, for the job and its verifier; the driver does it."""
    folder = run.with_name(f"{run.name}-clock")
    folder.mkdir()
    yield Around(environment=Clock(folder).environment)


AROUND = {"stopped": stopped, "full": full, "cut": cut, "clock": clock}
NEED_ROOT = ("full", "cut")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=1600)
    parser.add_argument("--turn", type=int, default=12, help="steps")
    parser.add_argument("--only", nargs="+", choices=["watch", "capsules", *AROUND], help="these conditions")
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "transformer_lm.py")
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, default=[ROOT / "invariants/packs/torch.json"])
    parser.add_argument("options", nargs="*", help="of the program, after --: `-- --width 256` makes longer steps")
    args = parser.parse_args()
    asked = args.only or ["watch", "capsules", *(name for name in AROUND if os.geteuid() == 0 or name not in NEED_ROOT)]
    ratios: dict[str, list[float]] = {condition: [] for condition in asked}
    shuffler = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="proctor-cost-") as folder:
        work = Path(folder)
        (work / "driver.py").write_text(DRIVER)
        _, losses = measure("record", work, 0, args)
        same = True
        for number in range(args.rounds):
            for condition in shuffler.sample(asked, len(asked)):
                turns, those = measure(condition, work, number, args)
                same &= those == losses
                of = compared(turns)
                ratios[condition] += of
                step = 1e3 * statistics.median(itertools.chain(*turns[::2]))
                print(f"round {number}: {condition:8} {step:.1f} ms a step, ratio {statistics.median(of):.3f} of {len(of)} turns", flush=True)
    for condition in asked:
        of = ratios[condition]
        error = statistics.stdev(of) / len(of) ** 0.5 if len(of) > 1 else float("nan")
        print(f"{condition:8} step time ÷ without a verifier: {statistics.median(of):.3f} (mean {statistics.mean(of):.3f} ± {error:.3f})")
    print("losses: the same bit for bit" if same else "losses DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
