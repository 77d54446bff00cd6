"""Mistakes that users of a library make, planted into small ordinary programs: what the torch pack alone finds, and what the library's pack finds beside it.

    python benchmarks/library_bugs.py [--work DIR] [--only peft] [--table FILE]

Programs: `benchmarks/library_bugs/<library>_*.py`; no pack is made from them. Each names its bugs in its docstring, and plants one with `--bug`. It runs as it is with three seeds, and once with each bug, recorded whole, in
the environment of this interpreter; a library that is not installed is left out. A bug that ends with an error is one that nobody needs to be told of, and does not count. *Found* is a violation of any severity; an alarm on the
program as it is, is false.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import ROOT
from exam import PROCTOR, run

from proctor.invariants.pack import Pack, read_pack
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

PROGRAMS: Final = ROOT / "benchmarks" / "library_bugs"
PACKS: Final = ROOT / "invariants" / "packs"
SEEDS: Final = ("0", "1", "2")


class Told(NamedTuple):
    """What packs said of one run."""

    checked: int
    found: tuple[str, ...]  # severity and text of each violation


def record(program: Path, work: Path, *options: str) -> Path | None:
    """The recording, made once; None where the program does not end well."""
    out = work / "-".join([program.stem, *(o.removeprefix("--") for o in options)])
    if not (out / "ended").exists():
        command = [*PROCTOR, "record", "--overwrite", "-o", str(out), "--", sys.executable, "-W", "ignore", str(program), *options]
        try:
            code = run(command, timeout_s=600).returncode
        except subprocess.TimeoutExpired:
            code = 124
        out.mkdir(parents=True, exist_ok=True)
        (out / "ended").write_text(str(code))
    return out if (out / "ended").read_text() == "0" else None


def told(out: Path, *packs: Pack) -> Told:
    result = check(Trace.load([out]), list(packs))
    return Told(result.checked, tuple(f"{v.severity.name.lower()}: {v.text}" for v in result.violations))


def bugs_of(program: Path) -> list[str]:
    listed = re.search(r"^Bugs: (.+)$", program.read_text(), re.MULTILINE)
    return listed[1].split(", ") if listed else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-library-bugs-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    torch = read_pack(PACKS / "torch.json")
    rows = ["| program, bug | torch pack | with the library's |", "|---|---|---|"]
    totals: dict[str, list[int]] = {}
    for program in sorted(PROGRAMS.glob("*_*.py")):
        library = program.stem.partition("_")[0]
        if args.only not in program.name or importlib.util.find_spec(library) is None:
            continue
        both = [torch, *([read_pack(path)] if (path := PACKS / f"{library}.json").exists() else [])]
        total = totals.setdefault(library, [0] * 6)  # bugs, found by torch, found by both, healthy runs, those with an alarm, rules checked
        for seed in SEEDS:
            out = record(program, work, "--seed", seed)
            if out is None:
                print(f"{program.stem} (seed {seed}) does not run here", flush=True)
                continue
            said = told(out, *both)
            total[3:] = [total[3] + 1, total[4] + bool(said.found), total[5] + said.checked]
            for text in said.found:
                print(f"  FALSE {program.stem} (seed {seed}): {text}", flush=True)
        for bug in bugs_of(program):
            out = record(program, work, "--bug", bug)
            if out is None:
                rows.append(f"| {program.stem}, {bug} | ends with an error | |")
                print(rows[-1], flush=True)
                continue
            alone, beside = told(out, torch), told(out, *both)
            more = [text for text in beside.found if text not in alone.found]
            total[:3] = [total[0] + 1, total[1] + bool(alone.found), total[2] + bool(beside.found)]
            rows.append(f"| {program.stem}, {bug} | {'; '.join(alone.found) or '–'} | {'; '.join(more) or '–'} |")
            print(rows[-1], flush=True)
    for library, (bugs, alone, beside, runs, alarms, checked) in totals.items():
        rows.append(f"| **{library}** | {alone} of {bugs} | {beside} of {bugs} |")
        print(f"{library}: {bugs} bugs, found by the torch pack {alone}, with the library's {beside}; {runs} healthy runs, {alarms} with a false alarm, {checked} rules checked", flush=True)
    if args.table:
        args.table.write_text("\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
