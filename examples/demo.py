"""The whole loop on small programs: record healthy runs, infer their rules, catch a silent bug in another program.

Run by `make demo`. Everything it does is a command that you can type yourself; each is printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("out/demo")
EXAMPLES = Path("examples")
HEALTHY = ["cnn_classifier.py", "lstm_forecast.py", "transformer_lm.py", "vae.py"]
BUGGY = EXAMPLES / "buggy" / "missing_zero_grad.py"


def proctor(*arguments: str) -> int:
    print(f"\n$ proctor {shlex.join(arguments)}", flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    return subprocess.run([sys.executable, "-m", "proctor.cli", *arguments], cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    (ROOT / OUT).mkdir(parents=True)
    runs = []
    print("1. Record healthy programs. The scripts know nothing of Proctor.")
    for name in HEALTHY:
        run = str(OUT / Path(name).stem)
        if proctor("record", "-o", run, "--", "python", str(EXAMPLES / name), "--iters", "24"):
            return 1
        runs.append(run)
    print("\n2. Learn what they have in common, and when it applies.")
    pack = str(OUT / "pack.json")
    if proctor("infer", *runs, "-o", pack):
        return 1
    print("\n3. A program that none of them resembles. Its loss falls, nothing crashes, and it is wrong.")
    for title, extra in (("healthy", ["--fixed"]), ("buggy", [])):
        run = str(OUT / title)
        if proctor("record", "-o", run, "--", "python", str(BUGGY), "--iters", "30", *extra):
            return 1
    print("\n4. Check the healthy version: silence.")
    clean = proctor("check", str(OUT / "healthy"), "-i", pack)
    print("\n5. Check the buggy one: an incident that names the cause.")
    caught = proctor("check", str(OUT / "buggy"), "-i", pack)
    print(f"\nThe report: {ROOT / OUT / 'buggy' / 'report.html'}")
    if clean == 0 and caught == 1:
        print("Demo: the bug was caught and the healthy program raised no alarm.")
        return 0
    print(f"Demo: unexpected exit codes: healthy {clean} (expected 0), buggy {caught} (expected 1)")
    return 1


if __name__ == "__main__":
    sys.exit(main())
