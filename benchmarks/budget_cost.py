"""What `watch --budget` costs a step behind the first 200, against the same process bare.

    python benchmarks/budget_cost.py [--budget 1%] [--iters 2400] [--turn 96] [--script PATH] [-- OPTION OF THE PROGRAM…]

One process under `proctor watch`: for every other turn of some steps all hooks are taken out of use, and the process trains bare. Printed is
the mean step of a turn with hooks ÷ the mean of those of the turns around it (means, since a budget is spent in few steps), its median and
mean over turns with the standard error, in CPU time of the training thread and in wall time, and what the budget itself says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLD = 3  # steps at the beginning of a turn
DRIVER = """
import json, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from proctor.instrument import attach

FREE, LENGTH = 240, int(sys.argv[1])
seen, turns, now, on = 0, [], [], True
last = (0.0, 0.0)

def stepped(*_):
    global seen, last, now, on
    at = (time.thread_time(), time.perf_counter())
    now.append((at[0] - last[0], at[1] - last[1]))
    seen += 1
    if seen >= FREE and (seen - FREE) % LENGTH == 0:
        turns.append((on, now))
        now, on = [], not on
        attach._observer.pause(not on)
    last = (time.thread_time(), time.perf_counter())

register_optimizer_step_post_hook(stepped)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
if not on:
    attach._observer.pause(False)
print("TURNS " + json.dumps(turns[1:]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="1%")
    parser.add_argument("--iters", type=int, default=2400)
    parser.add_argument("--turn", type=int, default=96, help="steps")
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "transformer_lm.py")
    parser.add_argument("options", nargs="*", help="of the program, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proctor-budget-") as folder:
        driver, run = Path(folder) / "driver.py", Path(folder) / "run"
        driver.write_text(DRIVER)
        program = [sys.executable, str(driver), str(args.turn), str(args.script), "--iters", str(args.iters), *args.options]
        watch = [sys.executable, "-m", "proctor.cli", "watch", "--budget", args.budget, "--fail-on", "never", "-o", str(run), "--", *program]
        done = subprocess.run(watch, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        line = next((text for text in done.stdout.splitlines() if text.startswith("TURNS ")), None)
        if line is None:
            raise SystemExit(done.stderr[-2000:])
        turns = json.loads(line.removeprefix("TURNS "))
        said = json.loads(next(run.glob("procs/*/process.json")).read_text())["overhead"]
    for column, clock in enumerate(("CPU of the training thread", "wall clock")):
        middle = [statistics.mean(step[column] for step in steps[COLD:]) for _, steps in turns]
        ratios = [2 * middle[i] / (middle[i - 1] + middle[i + 1]) for i in range(1, len(turns) - 1) if turns[i][0]]
        bare = 1e3 * statistics.median(m for m, (on, _) in zip(middle, turns) if not on)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        print(f"{clock}: {bare:.1f} ms a step bare, with a budget of {args.budget} {statistics.median(ratios):.3f} of it "
              f"(mean {statistics.mean(ratios):.3f} ± {error:.3f}, {len(ratios)} turns of {args.turn} steps)")
    print(f"the budget says: {100 * said['share']:.2f} %, {said['looked']} of {said['steps']} steps looked at, none waited for more than {said['delay']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
