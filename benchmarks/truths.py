"""False alarms of some relations alone: rules of healthy programs on their own other settings, and on each other.

    python benchmarks/truths.py [--relations option,paced,fresh:order] [--work DIR] [--folder DIR …] [--only a,b]
    python benchmarks/truths.py --wild CHECKOUTS --only graykode+nlp-tutorial      # public programs of the first half, by project

Every program of `examples/` and `examples/techniques/` that runs on one rank is recorded with two seeds, from which rules are learned, and
with other seeds, another size, another learning rate and another batch, which are checked; then rules of all programs but one are checked
on that one. A program that does not end with 0 is left out. Prints rules, checks and false alarms by relation, mode and setting.
`fresh:order` is the mode `order` of `fresh` alone.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import msgspec
from evaluation import SIZES
from forks import Forks

from benchmarks.wild import attempt as wild
from benchmarks.wild.manifest import SHIMS, Program, read_corpus
from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

EXAMPLES = Path(__file__).parent.parent / "examples"
NEW = "option,paced,varies,applied,resumed,progress:trains,progress:remembers,progress:counted,fresh:order,fresh:another,argument:passes,argument:training"
LEARNED = ("seed0", "seed1")


def settings(script: Path, iterations: str) -> dict[str, list[str]]:
    """Arguments by setting, of those that the script knows."""
    text = script.read_text()
    steps = ["--iters", iterations] if '"--iters"' in text else []
    found = {f"seed{seed}": [*steps, "--seed", str(seed)] for seed in range(3)} if '"--seed"' in text else {"seed0": steps, "seed1": steps, "seed2": steps}
    size = next(([option, value] for option, value in SIZES if f'"{option}"' in text), None)
    if size:
        found["size"] = [*found["seed2"], *size]
    for option, value in (("--lr", "0.002"), ("--batch-size", "5")):
        if f'"{option}"' in text:
            found[option.removeprefix("--")] = [*found["seed2"], option, value]
    return found


def scripts(folders: list[Path]) -> list[Path]:
    found = sorted(path for folder in folders for path in folder.glob("*.py") if path.name not in ("demo.py", "common.py"))
    return [path for path in found if "init_process_group" not in path.read_text()]


class Examples:
    """Programs of our own, as forks of one process; runs are made once."""

    def __init__(self, work: Path, folders: list[Path], iterations: str, only: set[str]) -> None:
        start = work / "start.py"
        start.write_text("def begin(torch):\n    torch.set_num_threads(1)\n")
        self._forks = Forks(start, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, timeout_s=300, memory_mib=16_384)
        self.programs = {path.stem: settings(path, iterations) for path in scripts(folders) if not only or path.stem in only}
        self._paths = {path.stem: path for path in scripts(folders)}

    def take(self, paths: dict[str, Path], programs: dict[str, dict[str, list[str]]]) -> None:
        """Have these programs in the place of those that were found."""
        self._paths, self.programs = paths, programs

    def run(self, name: str, setting: str, run: Path) -> int:
        path = self._paths[name]
        return self._forks.run(str(path), self.programs[name][setting], path.parent, run.with_suffix(".log"), {}, record=run)

    def close(self) -> None:
        self._forks.close()


class Wild:
    """Public programs of the first half, with another seed of all generators in each setting, and another batch."""

    def __init__(self, work: Path, checkouts: Path, only: set[str]) -> None:
        start = work / "start.py"
        start.write_text(_SEEDED.format(shim=str(SHIMS / "sitecustomize.py")))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR_", "WILD_"))} | wild.FIXED
        self._checkouts = checkouts
        self.forks = Forks(start, clean, timeout_s=300, memory_mib=wild.MEMORY_BYTES >> 20)
        chosen = [p for project in read_corpus() if project.half == "first" and project.name in only for p in project.programs if not p.skip]
        self._known: dict[str, Program] = {p.name: p for p in chosen if p.launcher == "python"}
        self.programs: dict[str, dict[str, list[str]]] = {name: {s: [] for s in ("seed0", "seed1", "seed2", "batch")} for name in self._known}

    def run(self, name: str, setting: str, run: Path) -> int:
        program = self._known[name]
        if setting == "batch":
            program = msgspec.structs.replace(program, batch=3, steps=max(8, program.steps // 2))
        folder = run.with_suffix(".arm")
        shutil.rmtree(folder, ignore_errors=True)
        (run.parent / "seed").write_text(setting)
        arm = wild._arm(program, self._checkouts / program.project, folder, [], self, record=run)  # type: ignore[arg-type]
        return -1 if arm.exit is None else arm.exit

    def close(self) -> None:
        self.forks.close()


_SEEDED = """
import importlib.util, os, random, sys, zlib
from pathlib import Path

def begin(torch):
    spec = importlib.util.spec_from_file_location("shim", {shim!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.begin(torch)
    import numpy
    seed = zlib.crc32((Path(__file__).parent / "seed").read_bytes())
    torch.manual_seed(seed); random.seed(seed); numpy.random.seed(seed)
"""


def record(source: Examples | Wild, work: Path, name: str, setting: str) -> Path | None:
    """The run of a program, made once; `None` if it failed."""
    run = work / f"{name}-{setting}"
    done = run.with_suffix(".done")
    if not done.exists():
        done.write_text(str(source.run(name, setting, run)))
    return run if done.read_text() == "0" and (run / "procs").is_dir() else None


def kind_of(rule: Invariant) -> str:
    """`fresh:order`: the relation and mode of a rule."""
    return f"{rule.hypothesis.relation}:{rule.hypothesis.get('mode') or ''}".rstrip(":")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relations", default=NEW)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--folder", type=Path, action="append", help="instead of examples/ and examples/techniques/")
    parser.add_argument("--iters", default="24")
    parser.add_argument("--wild", type=Path, help="folder of checkouts of benchmarks/wild")
    parser.add_argument("--only", default="", help="names of programs, or of projects with --wild, by commas")
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-truths-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    wanted = args.relations.split(",")
    relations = [relation for name, relation in registry().items() if any(name == w.partition(":")[0] for w in wanted)]
    only = set(args.only.split(",")) if args.only else set()
    source: Examples | Wild = (
        Wild(work, args.wild.resolve(), only) if args.wild else Examples(work, args.folder or [EXAMPLES, EXAMPLES / "techniques"], args.iters, only)
    )
    rules: dict[str, list[Invariant]] = {}
    checked: collections.Counter[tuple[str, str]] = collections.Counter()
    false: collections.Counter[tuple[str, str]] = collections.Counter()
    failed, made = [], {}

    def judge(setting: str, pack: list[Invariant], run: Path) -> None:
        trace = Trace.load([run])
        for kind in sorted({kind_of(rule) for rule in pack}):
            relation = registry()[kind.partition(":")[0]]
            result = check(trace, [Pack([rule for rule in pack if kind_of(rule) == kind])], relations={relation.name: relation})
            checked[setting, kind] += result.checked
            false[setting, kind] += len(result.violations)
            for violation in result.violations:
                print(textwrap.shorten(f"  {run.name} ({setting}): {kind}: {violation.text} | {violation.seen}", 300), flush=True)

    for program, options in source.programs.items():
        learned = [record(source, work, program, name) for name in LEARNED]
        if not all(learned):
            failed.append(program)
            continue
        found, _ = infer(shards.of_runs([run for run in learned if run]), relations, options=Options())
        found = [rule for rule in found if {rule.hypothesis.relation, kind_of(rule)} & {*wanted}]
        rules[program], made[program] = found, learned[0]
        for name in options:
            run = record(source, work, program, name) if name not in LEARNED else None
            if run is not None and found:
                judge(name.rstrip("0123456789"), rules[program], run)
        print(f"{program}: {len(found)} rules {dict(collections.Counter(map(kind_of, found)))}", flush=True)
    for stem, run in made.items():
        others = {rule.id: rule for other, several in rules.items() if other != stem for rule in several}
        if others and run is not None:
            judge("others", list(others.values()), run)
    source.close()
    totals = collections.Counter(kind_of(rule) for several in rules.values() for rule in several)
    spread = collections.Counter(kind for several in rules.values() for kind in {kind_of(rule) for rule in several})
    print(f"\n{len(rules)} programs; left out: {', '.join(failed) or 'none'}\n")
    kinds = sorted({setting for setting, _ in checked})
    print("| relation and mode | programs | rules | " + " | ".join(kinds) + " |\n|---|---|---|" + "---|" * len(kinds))
    for name in sorted(totals):
        print(f"| `{name}` | {spread[name]} | {totals[name]} | " + " | ".join(f"{false[kind, name]} of {checked[kind, name]}" for kind in kinds) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
