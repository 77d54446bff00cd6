"""Is every right parallel program still `equivalent` where all draws are those of one device (`oracle run --rng keyed`)?

    python benchmarks/parallel_candidates.py [--only SUBSTRING] [--bugs FOLDER] [--list]

The candidates of examples/oracle beside their references, with dropout where a plan says how its masks lie; and of FOLDER
(one folder a case: `reference.py`, `fixed.py`) the fixed scripts. Prints a line for each; exit code 1 when one is not equivalent.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "oracle"
INSIDE, RESIDUAL = r"layers\.\d+\.attention", r"layers\.\d+|embedding\.drop"
SMALL = "--layers 1 --steps 1"


def drawn(mesh: dict[str, int], inside: str, residual: str) -> str:
    """A plan that says how masks lie."""
    text = f"mesh = {{ axes = {list(mesh)}, sizes = {list(mesh.values())} }}\n".replace("'", '"')
    return text + f"draw = [\n  {{ module = '{INSIDE}', layout = {{ {inside} }} }},\n  {{ module = '{RESIDUAL}', layout = {{ {residual} }} }},\n]\n"


# name, script, options of both, options of the candidate, plan
CASES = [
    ("GPT, tp 2", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh tp=2", drawn({"tp": 2}, "tp = 1", "")),
    ("GPT, tp 2, sequence parallel", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh tp=2 --sp", drawn({"tp": 2}, "tp = 1", "tp = 1")),
    ("GPT, DDP 2", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh dp=2", drawn({"dp": 2}, "dp = 0", "dp = 0")),
    ("GPT, FSDP2 2", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh dp=2 --fsdp", drawn({"dp": 2}, "dp = 0", "dp = 0")),
    ("GPT, ZeRO-1 2", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh dp=2 --zero", drawn({"dp": 2}, "dp = 0", "dp = 0")),
    ("GPT, dp 2 x tp 2", "parallel_gpt.py", f"{SMALL} --dropout 0.2", "--mesh dp=2,tp=2", drawn({"dp": 2, "tp": 2}, "dp = 0, tp = 1", "dp = 0")),
    ("GPT, pipeline, GPipe", "pipeline_gpt.py", "--steps 1 --microbatches 2", "--nprocs 2 --schedule gpipe", ""),
    ("GPT, pipeline, 1F1B", "pipeline_gpt.py", "--steps 1 --microbatches 2", "--nprocs 2 --schedule 1f1b", ""),
    ("GPT, pipeline, interleaved", "pipeline_gpt.py", "--steps 1 --microbatches 2 --layers 4", "--nprocs 2 --schedule interleaved", ""),
    ("experts on 2 ranks", "switch_moe.py", SMALL, "--nprocs 2", ""),
    ("Llama, tp_plan on 2 ranks", "llama_tp.py", "--steps 1", "--nprocs 2", ""),
]


def verdict(reference: list[str], candidate: list[str], plan: str, folder: Path) -> str:
    """What the oracle says, in a word; else its last line."""
    chosen = []
    if plan:
        (folder / "plan.toml").write_text(plan)
        chosen = ["--plan", str(folder / "plan.toml")]
    command = [sys.executable, "-m", "proctor.cli", "oracle", "run", "--rng", "keyed", "--samples", "2", "--no-localise", *chosen]
    command += ["--reference", " ".join(reference), "--candidate", " ".join(candidate)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = re.search(r"PROCTOR ORACLE\s+([A-Z ]+)", done.stdout)
    return said[1].strip().lower() if said else (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()[-1][:150]


def pairs(bugs: Path | None) -> list[tuple[str, list[str], list[str], str]]:
    """Name, command of the reference, command of the candidate, plan."""
    found = [
        (name, [sys.executable, str(EXAMPLES / script), *both.split()], [sys.executable, str(EXAMPLES / script), *both.split(), *more.split()], plan)
        for name, script, both, more, plan in CASES
    ]
    for case in sorted(bugs.iterdir()) if bugs else ():
        if (case / "fixed.py").is_file() and (case / "reference.py").is_file():
            found.append((case.name, [sys.executable, str(case / "reference.py")], [sys.executable, str(case / "fixed.py")], ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="SUBSTRING", default="")
    parser.add_argument("--bugs", metavar="FOLDER", type=Path)
    parser.add_argument("--list", action="store_true", help="what there is, without running it")
    args = parser.parse_args()
    wrong = 0
    for name, reference, candidate, plan in pairs(args.bugs):
        if args.only not in name:
            continue
        if args.list:
            print(name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            said = verdict(reference, candidate, plan, Path(folder))
        wrong += said != "equivalent"
        print(f"| {name} | {said} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
