"""What do the relations of a model cost beside a step and the start of the program (goal: 20 steps + the start)?

    python benchmarks/self_cost.py [PROGRAM ...]

Programs are the clean ones of `self_pairs_programs/`; the start is `import torch` in a fresh process, which is less than a program's own. The step is the shortest
between two updates, without the check. Exit code 1 if a program costs more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = Path(__file__).with_name("self_pairs_programs")
MODELS = ("causal", "inputs", "neighbours", "padding", "parameters", "permutation", "repeatable", "tied")


def main() -> int:
    """Check each program, print its cost."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    start_s = time.monotonic() - began
    print(f"start: {start_s:.2f} s")
    only = [x for name in MODELS for x in ("--only", name)]
    over = 0
    for name in sys.argv[1:] or ("classifier", "language", "encoder", "blocks", "optimizers"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "proctor.cli", "oracle", "self", "--format", "json", "-o", f"{folder}/self", *only, "--", sys.executable, str(PROGRAMS / f"{name}.py")]
            report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        step_s, models_s = report["step_s"], report["models_s"]
        allowed = 20 * step_s + start_s
        over += models_s > allowed
        print(f"{name:<11} step {1000 * step_s:.1f} ms, relations {models_s:.2f} s of {allowed:.2f} s, {'within' if models_s <= allowed else 'MORE'}", flush=True)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
