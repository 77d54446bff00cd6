"""Mistakes that users of a library make, planted into small ordinary programs: what the torch pack alone finds, and what the library's pack finds beside it.

    python benchmarks/library_bugs.py [--work DIR] [--only peft,deepspeed] [--table FILE]

Programs: `benchmarks/library_bugs/<library>_*.py`; no pack is made from them. Each names its bugs in its docstring, and plants one with `--bug`; `*_kinds.py` have
right trainings only, one a kind. Each runs as it is (with two seeds, or in each kind) and with each bug, recorded whole, in the environment of this interpreter; a library that is not installed is left out. A bug that ends with an error is one that nobody needs to be told of, and does not count. *Found* is a violation of any severity; an alarm on the
program as it is, is false.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import ROOT
from forks import Forks

from proctor.invariants.pack import read_pack
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

PROGRAMS: Final = ROOT / "benchmarks" / "library_bugs"
PACKS: Final = ROOT / "invariants" / "packs"
SEEDS: Final = ("0", "1")


# What one process imports for all programs of a library. peft is left to each: its functions are imported by name among its modules, before anybody looks.
WARM: Final = {
    "peft": "", "deepspeed": "deepspeed",
    "diffusers": "diffusers.models.unets.unet_2d_condition diffusers.models.unets.unet_2d diffusers.models.autoencoders.autoencoder_kl transformers.models.t5.modeling_t5",
}  # fmt: skip
START: Final = """
import contextlib, sys
for name in {!r}:
    with contextlib.redirect_stdout(sys.stderr):
        __import__(name)
def begin(torch):
    torch.set_num_threads(1)
"""


class Told(NamedTuple):
    """What packs said of one run: how many rules were checked, and severity and text of what is violated, by the torch pack and by the library's."""

    checked: int
    torch: tuple[str, ...]
    library: tuple[str, ...]


def record(forks: Forks, program: Path, work: Path, *options: str) -> Path | None:
    """The recording, made once; None where the program does not end well."""
    out = work / "-".join([program.stem, *(o.removeprefix("--") for o in options)])
    if not (out / "ended").exists():
        out.mkdir(parents=True, exist_ok=True)
        code = forks.run(str(program), options, program.parent, out.with_suffix(".log"), {}, record=out)
        (out / "ended").write_text(str(code))
    return out if (out / "ended").read_text() == "0" else None


def told(out: Path, library: str) -> Told:
    torch, path = read_pack(PACKS / "torch.json"), PACKS / f"{library}.json"
    result = check(Trace.load([out]), [torch, *([read_pack(path)] if path.exists() else [])])
    own = {rule.id for rule in torch.invariants}
    said = [(v.id in own, f"{v.severity.name.lower()}: {v.text}") for v in result.violations]
    return Told(result.checked, tuple(text for mine, text in said if mine), tuple(text for mine, text in said if not mine))


def listed(program: Path, word: str) -> list[str]:
    """What the docstring of a program names behind a word."""
    found = re.search(rf"^{word}: (.+)$", program.read_text(), re.MULTILINE)
    return found[1].split(", ") if found else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", default="", help="programs whose names contain one of these, separated by commas")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-library-bugs-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    processes: dict[str, Forks] = {}
    rows = ["| program, bug | torch pack | the library's |", "|---|---|---|"]
    totals: dict[str, list[int]] = {}
    for program in sorted(PROGRAMS.glob("*_*.py")):
        library = program.stem.partition("_")[0]
        if not any(word in program.name for word in args.only.split(",")) or importlib.util.find_spec(library) is None:
            continue
        if library not in processes:
            start = work / f"start_{library}.py"
            start.write_text(START.format(WARM[library].split()))
            processes[library] = Forks(start, environment, timeout_s=600, memory_mib=65_536)
        forks = processes[library]
        total = totals.setdefault(library, [0] * 7)  # bugs, found by torch, by the library's, by either, healthy runs, those with an alarm, rules checked
        for options in [("--kind", kind) for kind in listed(program, "Kinds")] or [("--seed", seed) for seed in SEEDS]:
            out = record(forks, program, work, *options)
            if out is None:
                print(f"{program.stem} ({options[1]}) does not run here", flush=True)
                continue
            said = told(out, library)
            total[4:] = [total[4] + 1, total[5] + bool(said.torch or said.library), total[6] + said.checked]
            for text in (*said.torch, *said.library):
                print(f"  FALSE {program.stem} ({options[1]}): {text}", flush=True)
        for bug in listed(program, "Bugs"):
            out = record(forks, program, work, "--bug", bug)
            if out is None:
                rows.append(f"| {program.stem}, {bug} | ends with an error | |")
            else:
                said = told(out, library)
                total[:4] = [total[0] + 1, total[1] + bool(said.torch), total[2] + bool(said.library), total[3] + bool(said.torch or said.library)]
                rows.append(f"| {program.stem}, {bug} | {'; '.join(said.torch) or '–'} | {'; '.join(said.library) or '–'} |")
            print(rows[-1], flush=True)
    for forks in processes.values():
        forks.close()
    for library, (bugs, torch, own, either, runs, alarms, checked) in totals.items():
        rows.append(f"| **{library}**, {bugs} bugs | {torch} | {own}, either {either} |")
        print(f"{library}: {bugs} bugs, found by the torch pack {torch}, by the library's {own}, by either {either}; {runs} healthy runs, {alarms} with a false alarm, {checked} rules checked", flush=True)
    if args.table:
        args.table.write_text("\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
