"""False alarms of `proctor oracle self` on healthy public programs: what is told as broken of programs that their authors use.

    python -m benchmarks.self_wild WILD [--only TEXT] [--jobs N] [--json FILE] [--number N]

WILD is a folder of checkouts as of `benchmarks.wild`, whose manifests, shims and data are used; one program of each project. Every `different` is
listed with its text: a reader decides whether it is true of the program. `compile` and `determinism` are left out unless `--all` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.wild.__main__ import chosen
from benchmarks.wild.attempt import FIXED, importable, lay_out
from benchmarks.wild.manifest import SHIMS, Program, read_corpus


def attempt(program: Program, checkout: Path, *, everything: bool, timeout_s: float) -> dict[str, Any]:
    """The report of one program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place, installed, script = lay_out(program, checkout, folder)
        kind, _, ranks = program.launcher.partition(" ")
        launcher = [sys.executable] if kind == "python" else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR_", "WILD_"))}, **FIXED, "WILD_SHIMS": ",".join(program.shims),
            "WILD_STEPS": str(program.steps), "WILD_BATCH": str(program.batch), "WILD_DIGEST": str(folder), "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SHIMS), str(installed), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        skip = [] if everything else ["--skip", "compile", "--skip", "determinism"]
        command = [sys.executable, "-m", "proctor.cli", "oracle", "self", "--format", "json", "--timeout", str(timeout_s), "--budget", "150", *skip, "--", *launcher, script, *program.arguments]
        began = time.monotonic()
        try:
            done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=timeout_s + 120, check=False)
            report = json.loads(done.stdout)
        except ValueError:
            report = {"verdict": "error", "reason": done.stderr.strip()[-300:], "outcomes": []}
        except subprocess.TimeoutExpired:
            report = {"verdict": "error", "reason": "took too long", "outcomes": []}
        return {**report, "name": program.name, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Run programs, print what is told of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wild", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seen: set[str] = set()
    programs = []
    for program in chosen(read_corpus(), "", args.only):
        fits = not program.skip and (args.wild / program.project / program.path).is_file() and all(importable(n) for n in program.needs)
        if fits and (args.only or program.project not in seen):
            seen.add(program.project)
            programs.append(program)
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(attempt, p, args.wild / p.project, everything=args.all, timeout_s=args.timeout) for p in programs[: args.number]]
        for job in jobs:
            results.append(result := job.result())
            count = {w: sum(o["verdict"] == w for o in result["outcomes"]) for w in ("equivalent", "different", "by-design", "inconclusive", "not-applicable")}
            print(f"{result['verdict']:<13}{result['name']}  {count} {result['reason'] if result['verdict'] == 'error' else ''}  {result['seconds']} s", flush=True)
            for o in result["outcomes"]:
                if o["verdict"] in ("different", "by-design"):
                    print(f"    {o['verdict']:<10} {o['relation']}: {o['reason'][:200]}  [{(o['culprit'] or {}).get('module', '')} {(o['culprit'] or {}).get('source', '')}]", flush=True)
    ran = [r for r in results if r["verdict"] != "error"]
    loud = [r for r in ran if r["verdict"] == "different"]
    print(f"{len(ran)} of {len(results)} programs checked; {len(loud)} told as broken; {sum(o['verdict'] == 'equivalent' for r in ran for o in r['outcomes'])} relations held")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
