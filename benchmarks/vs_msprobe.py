"""Proctor against msprobe 26.2 (Huawei's mindstudio-probe): one job, one machine, in turn.

    python benchmarks/vs_msprobe.py --msprobe-python ENV/bin/python [--rounds 3] [--steps 500] [--write]

The job is `monitored_lm.py`, a language model of four blocks. Cost: CPU time of the training thread a step (median behind the first 200), divided
by that of the same job bare in the same environment and round. Bugs: what each says by itself, without anything learned, of the healthy job and of five
planted bugs in 120 steps: msprobe's two alert rules (turbulence above 0.5, NaN or above 1e10), Proctor's shipped packs under `watch`. `--write` puts the tables
into docs/comparison.md. msprobe lives in an environment of its own (`pip install torch==2.13.0 mindstudio-probe==26.2.0`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monitored_lm import BUGS

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "benchmarks" / "monitored_lm.py"
PAGE = ROOT / "docs" / "comparison.md"
MARKS = "<!-- msprobe -->\n", "<!-- end of msprobe -->"
WATCH = [sys.executable, "-m", "proctor.cli", "watch", "--fail-on", "never", "-o", "run"]
ARMS: dict[str, tuple[str, str, list[str]]] = {  # what it is: whose environment, HOW, what stands before the command
    "msprobe, monitor, all modules": ("peer", "monitor", []),
    "msprobe, monitor, one block of four": ("peer", "sampled", []),
    "msprobe, statistics of modules (dump)": ("peer", "dump", []),
    "Proctor, `watch --full`": ("ours", "none", [*WATCH, "--full", "--"]),
    "Proctor, `watch`": ("ours", "none", [*WATCH, "--"]),
    "Proctor, `watch --budget 1%`": ("ours", "none", [*WATCH, "--budget", "1%", "--"]),
}
ALERT = re.compile(r"Rule (\w+) reports anomaly signal in (.+?) at step (\d+)")


def run(python: str, how: str, bug: str, steps: int, before: Sequence[str], folder: Path) -> tuple[dict[str, Any], str]:
    """The job's result, and all that was said."""
    done = subprocess.run(
        [*before, python, str(PROGRAM), how, bug, str(steps)], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    found = re.search(r"^RESULT (.*)$", said, re.MULTILINE)
    if done.returncode or not found:
        raise SystemExit(f"{python} {how} {bug}: exit code {done.returncode}: {said[-2000:]}")
    return json.loads(found[1]), said


def cost(pythons: dict[str, str], rounds: int, steps: int) -> list[str]:
    """Rows of the table of costs."""
    ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
    same: dict[str, bool] = {}
    bare_ms = []
    for _ in range(rounds):
        bare = {}
        for whose, python in pythons.items():
            with tempfile.TemporaryDirectory(prefix="proctor-peer-") as folder:
                bare[whose], _ = run(python, "none", "none", steps, [], Path(folder))
        bare_ms.append(bare["ours"]["ms"])
        for arm, (whose, how, before) in ARMS.items():
            with tempfile.TemporaryDirectory(prefix="proctor-peer-") as folder:
                result, _ = run(pythons[whose], how, "none", steps, before, Path(folder))
            ratios[arm].append(result["ms"] / bare[whose]["ms"])
            same[arm] = same.get(arm, True) and result["loss"] == bare[whose]["loss"]
            print(f"{arm}: {ratios[arm][-1]:.3f}", flush=True)
    head = f"| {rounds} rounds of {steps} steps; bare {statistics.median(bare_ms):.0f} ms of CPU a step | a step ÷ bare (least, most) | loss as bare |\n|---|---|---|"
    return [head, *(f"| {arm} | **{statistics.median(r):.2f}** ({min(r):.2f}, {max(r):.2f}) | {'yes' if same[arm] else 'no'} |" for arm, r in ratios.items())]


def bugs(pythons: dict[str, str], steps: int = 120) -> list[str]:
    """Rows of the table of bugs."""
    rows = ["| job | msprobe's alerts | Proctor |\n|---|---|---|"]
    for bug in ("none", *BUGS):
        with tempfile.TemporaryDirectory(prefix="proctor-peer-") as name:
            folder = Path(name)
            alerts = ALERT.findall(run(pythons["peer"], "monitor", bug, steps, [], folder)[1])
            run(pythons["ours"], "none", bug, steps, [*WATCH, "--"], folder)
            incidents = json.loads((folder / "run" / "check.json").read_text())["incidents"]
        kinds = ", ".join(f"{sum(a[0] == kind for a in alerts)} {kind}" for kind in dict.fromkeys(a[0] for a in alerts))
        theirs = f"{kinds}; the first in step {min(int(a[2]) for a in alerts)}" if alerts else "none"
        ours = "; ".join(incident["title"].replace("|", "\\|") for incident in incidents) or "nothing"
        rows.append(f"| {'healthy' if bug == 'none' else bug.replace('_', ' ')} | {theirs} | {ours} |")
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--msprobe-python", metavar="PATH", required=True, help="interpreter of the environment with msprobe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--write", action="store_true", help="into docs/comparison.md")
    args = parser.parse_args()
    pythons = {"peer": args.msprobe_python, "ours": sys.executable}
    tables = "\n".join(bugs(pythons)) + "\n\n" + "\n".join(cost(pythons, args.rounds, args.steps)) + "\n"
    print(tables)
    if args.write:
        text = PAGE.read_text()
        begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
        PAGE.write_text(text[:begin] + tables + text[end:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
