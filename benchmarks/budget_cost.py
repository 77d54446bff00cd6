"""What `watch --budget` costs a step behind the first 200, against the same process bare.

    python benchmarks/budget_cost.py [NAME…] [--budget 1%] [--steps 3000] [--turn 23] [--repeat 3] [--write]

One job under `proctor watch`: in every other turn of some steps all hooks are taken out of use, and it trains bare. A figure is the sum over the
turns with hooks ÷ that over the turns without, in CPU seconds of the training thread; the standard error is that of 200 draws of pairs of neighbouring
turns. A turn is too short for the rhythm of looks and glances, so steps are told apart, and what a step with a glance and one that is looked at in full
cost more than a bare one is counted as often as they are due at the densities that the budget has chosen. To that come the CPU seconds of
Proctor's own threads, and the calls of taps that pass through, which stand in both halves, at what one costs (benchmarks/tap.py). Means are of the
middle nine tenths of the steps of a kind. Wall clock stands beside it. One job's figure is off by its standard error or more, so each is the mean of
`--repeat` jobs, which are also named one by one. `--write`: the table of docs/watch.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from budget_programs import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "watch.md"
MARKS = "<!-- budget -->\n", "<!-- end of budget -->"
PASS_S = 2.5e-8  # a call through a tap that does nothing
COLD = 4  # steps at the beginning of a turn
DRIVER = """
import json, os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from proctor.instrument import attach

FREE, LENGTH, OUT = 260, int(sys.argv[1]), sys.argv[2]
seen, rows, on, last, calls, glances = 0, [], True, None, [0, 0], [0, 0]

def watched(look):
    def looks(*args):
        glances[0] += 1
        look(*args)
    return looks

def threads():
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in attach._observer._threads() if t.is_alive())

def stepped(*_):
    global seen, last, on
    observer, now = attach._observer, (time.thread_time(), time.perf_counter())
    seen += 1
    if seen == 1:
        observer.sentinel._look = watched(observer.sentinel._look)
    if seen <= 200:
        calls[:] = observer.recorder.current_seq, seen
    if last is not None:
        kind = "bare" if not on else "full" if observer.sampled else "glance" if glances[0] > glances[1] else "rest"
        rows.append((seen, kind, now[0] - last[0], now[1] - last[1], threads() if seen % LENGTH in (0, 1) else None))
    glances[1] = glances[0]
    if seen >= FREE and seen % LENGTH == 0:
        on = not on
        observer.pause(not on)
    last = (time.thread_time(), time.perf_counter()) if seen >= FREE else None

register_optimizer_step_post_hook(stepped)
sys.argv = sys.argv[3:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
observer = attach._observer
if not on:
    observer.pause(False)
level, pause = observer.budget.level, observer.sentinel._pause
with open(f"{OUT}/{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump({"rows": rows, "level": level, "pause": pause, "calls": calls[0] / max(calls[1], 1)}, file)
"""


def run(name: str, budget: str, steps: int, turn: int, work: Path) -> list[dict[str, object]]:
    """What the ranks of a job noted."""
    driver = work / "driver.py"
    driver.write_text(DRIVER)
    program = [str(driver), str(turn), str(work), str(ROOT / "benchmarks" / "budget_programs.py"), name, str(steps)]
    ranks = PROGRAMS[name][1]
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    watch = [sys.executable, "-m", "proctor.cli", "watch", "--budget", budget, "--warmup", "200", "--fail-on", "never", "-o", str(work / "run"), "--"]
    done = subprocess.run([*watch, *start, *program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    found = [json.loads(path.read_text()) for path in sorted(work.glob("[0-9].json"))]
    if len(found) != ranks:
        raise SystemExit(done.stderr[-3000:])
    said = [json.loads(p.read_text())["overhead"] for p in (work / "run").glob("procs/*/process.json")]
    for one, overhead in zip(found, sorted(said, key=str)):
        one["said"] = overhead
    return found


def middle(values: list[float]) -> float:
    """Mean without the twentieth at each end."""
    values, out = sorted(values), len(values) // 20
    return statistics.mean(values[out : len(values) - out])


def judged(found: dict, turn: int, column: int, draws: int = 200) -> tuple[float, float, float, float, float]:
    """Ratio, its standard error, seconds of a bare step, and how much of the ratio glances and full looks are."""
    pairs: dict[int, dict[str, list[float]]] = {}
    kinds: dict[str, list[float]] = {"bare": [], "rest": [], "glance": [], "full": []}
    for row in found["rows"]:
        step, kind, value = row[0], row[1], row[column]
        if (step - 1) % turn >= COLD:
            pairs.setdefault((step - 1) // (2 * turn), {}).setdefault(kind, []).append(value)
            kinds[kind].append(value)
    usual = max(("rest", "glance", "full"), key=lambda kind: len(kinds[kind]))  # a process with dear steps affords all of them in full
    whole = [p for p in pairs.values() if len(p.get("bare", ())) > turn // 2 and len(p.get(usual, ())) > turn // 4]
    if len(whole) < 2:
        raise SystemExit(f"too few steps to judge ({ {kind: len(values) for kind, values in kinds.items()} }): ask for more by --steps")

    def more(kind: str, than: str) -> float:
        return max(0.0, middle(kinds[kind]) - middle(kinds[than])) if kinds[kind] else 0.0

    step_s = middle(kinds["bare"])
    looks = 0.0 if usual == "full" else more("full", "bare") / (1 << found["level"]) / step_s
    glances = 0.0 if usual == "full" else more("glance", usual) / (1 << found["pause"]) / step_s

    def ratio(chosen: list[dict[str, list[float]]]) -> float:
        on, off = ([value for p in chosen for value in p[kind]] for kind in (usual, "bare"))
        return middle(on) / middle(off)

    random.seed(0)
    spread = statistics.stdev(ratio(random.choices(whole, k=len(whole))) for _ in range(draws))
    return ratio(whole) + looks + glances, spread, step_s, glances, looks


class Cost(NamedTuple):
    """Of one job, of the rank that pays most. Ratios to the same job bare; `parts` in per cent."""

    cpu: float
    cpu_error: float
    wall: float
    wall_error: float
    step_s: float
    step_wall_s: float
    parts: list[float]  # steps between, glances, full looks, own threads, taps that pass through
    delay: int
    round: int


def cost_of(found: list[dict], turn: int) -> Cost:
    worst = max(found, key=lambda one: judged(one, turn, 2)[0])
    cpu, spread, step_s, glances, looks = judged(worst, turn, 2)
    wall, wall_spread, wall_s, _, _ = judged(worst, turn, 3)
    marks = [(row[0], row[4]) for row in worst["rows"] if row[4] is not None]
    ours = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]) / step_s
    passing = worst["calls"] * PASS_S / step_s
    parts = [100 * part for part in (cpu - 1 - looks - glances, glances, looks, ours, passing)]
    said = worst["said"]
    return Cost(cpu + ours + passing, spread, wall, wall_spread, step_s, wall_s, parts, said["delay"], said["round"])


def row_of(name: str, costs: list[Cost]) -> tuple[str, float]:
    """A row of the table, the mean of some jobs, and its ratio. Errors of single jobs are independent."""

    def mean_of(values: list[float], errors: list[float]) -> str:
        return f"{statistics.mean(values):.4f} ± {math.hypot(*errors) / len(errors):.4f}"

    cpu = mean_of([c.cpu for c in costs], [c.cpu_error for c in costs])
    single = ", ".join(f"{c.cpu:.3f}" for c in costs)
    wall = mean_of([c.wall for c in costs], [c.wall_error for c in costs])
    parts = " + ".join(f"{statistics.mean(column):.2f}" for column in zip(*(c.parts for c in costs), strict=True))
    step_ms, wall_ms = (1e3 * statistics.mean(values) for values in ([c.step_s for c in costs], [c.step_wall_s for c in costs]))
    line = (
        f"| {PROGRAMS[name][0]} | {step_ms:.1f} ({wall_ms:.0f}) | **{cpu}** ({single}) | {parts} | {wall} | "
        f"{max(c.delay for c in costs)} | {max(c.round for c in costs)} |"
    )
    return line, statistics.mean(c.cpu for c in costs)


HEAD = """| after the first 200 steps, ÷ the same job bare | ms of CPU a step (of wall clock) | all CPU of Proctor in the job's processes (single jobs) | per cent: steps between, glances, full looks, own threads, taps that pass through | wall clock | steps without a look, at most | steps until all was glanced at |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PROGRAMS, []], help="of programs; all when left out")
    parser.add_argument("--budget", default="1%")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--turn", type=int, default=23, help="steps; not a power of two, which is the rhythm of glances")
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each program")
    parser.add_argument("--write", action="store_true", help="into docs/watch.md")
    args = parser.parse_args()
    lines, over = [], []
    for name in args.names or PROGRAMS:
        costs = []
        for _ in range(args.repeat):
            with tempfile.TemporaryDirectory(prefix="proctor-budget-") as folder:
                costs.append(cost_of(run(name, args.budget, args.steps, args.turn, Path(folder)), args.turn))
        line, total = row_of(name, costs)
        print(line, flush=True)
        lines.append(line)
        over += [name] if total > 1.01 else []
    print(f"over 1.01: {', '.join(over) or 'none'}")
    if args.write:
        text = PAGE.read_text()
        begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
        PAGE.write_text(text[:begin] + HEAD + "\n".join(lines) + "\n" + text[end:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
