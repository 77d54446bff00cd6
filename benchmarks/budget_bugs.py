"""Are published bugs found in steps that a budget leaves out? Each bug, with nothing but two steps looked at in full for free.

    python benchmarks/budget_bugs.py FOLDER [--only SUBSTRING…] [--iters 400] [--budget 1%]

Real bugs are there from the first steps, which a budget looks at in full. So here only the first two are free, and the program runs on for as long as
it is told: what is printed is the step in which a violation was told first, how many steps were looked at, and the longest time without a look that
the budget states. Rules are inferred from the two healthy examples of a case, or are those that ship where it has none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROCTOR = [sys.executable, "-m", "proctor.cli"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)


def pack_of(case: Path, work: Path) -> list[str]:
    """Options of `watch` with rules from the examples of a case."""
    examples = [path for path in (case / "example_1.py", case / "example_2.py") if path.exists()]
    for path in examples:
        run([*PROCTOR, "record", "--overwrite", "-o", str(work / path.stem), "--", sys.executable, str(path)])
    pack = work / "pack.json"
    run([*PROCTOR, "infer", "-q", *(str(work / path.stem) for path in examples), "-o", str(pack)])
    return ["-i", str(pack)] if pack.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--iters", type=int, default=400)
    parser.add_argument("--budget", default="1%")
    args = parser.parse_args()
    cases = [p for p in sorted(args.folder.glob("*/buggy.py")) if any(text in p.parent.name for text in args.only)]
    for script in cases:
        with tempfile.TemporaryDirectory(prefix="proctor-bugs-") as folder:
            work = Path(folder)
            rules = pack_of(script.parent, work)
            out = work / "run"
            watch = [*PROCTOR, "watch", "--budget", args.budget, "--warmup", "2", "--fail-on", "never", *rules, "-o", str(out), "--"]
            done = run([*watch, sys.executable, str(script), "--iters", str(args.iters)])
            events = out / "verify" / "events.jsonl"
            told = [json.loads(line)["data"] for line in events.read_text().splitlines()] if events.exists() else []
            first = min((e["first_step"] for e in told if "first_step" in e), default=None)
            said = [json.loads(p.read_text()).get("overhead", {}) for p in out.glob("procs/*/process.json")]
            looked, steps, delay = (max((s.get(key, 0) for s in said), default=0) for key in ("looked", "steps", "delay"))
            print(f"{script.parent.name:32} first told of step {first}, {looked} of {steps} steps looked at, bound {delay}", flush=True)
            if first is None:
                print("    " + " / ".join(done.stderr.strip().splitlines()[-2:])[:300], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
