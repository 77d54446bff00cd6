"""False alarms of some relations alone: rules of healthy programs on their own other settings, and on each other.

    python benchmarks/truths.py [--relations option,paced,varies,applied,resumed] [--work DIR] [--folder DIR …] [--ranks 2]

Every program of `examples/` and `examples/techniques/` that runs on one rank is recorded with two seeds, from which rules are learned, and
with other seeds, another size, another learning rate and another batch, which are checked; then rules of all programs but one are checked
on that one. A program that does not end with 0 is left out. Prints rules, checks and false alarms by relation and setting.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import SIZES
from forks import Forks

from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

EXAMPLES = Path(__file__).parent.parent / "examples"
NEW = "option,paced,varies,applied,resumed"
LEARNED = ("seed0", "seed1")


def settings(script: Path, iterations: str) -> dict[str, list[str]]:
    """Arguments by setting, of those that the script knows."""
    text = script.read_text()
    steps = ["--iters", iterations] if '"--iters"' in text else []
    found = {f"seed{seed}": [*steps, "--seed", str(seed)] for seed in range(4)} if '"--seed"' in text else {"seed0": steps, "seed1": steps, "seed2": steps}
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


class Runs:
    """Recorded runs, made once."""

    def __init__(self, work: Path) -> None:
        start = work / "start.py"
        start.write_text("def begin(torch):\n    torch.set_num_threads(1)\n")
        self._work = work
        self._forks = Forks(start, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, timeout_s=300, memory_mib=16_384)

    def record(self, script: Path, setting: str, arguments: list[str]) -> Path | None:
        """The run, `None` if the program failed."""
        run = self._work / f"{script.stem}-{setting}"
        done = self._work / f"{script.stem}-{setting}.done"
        if not done.exists():
            code = self._forks.run(str(script), arguments, script.parent, self._work / f"{run.name}.log", {}, record=run)
            done.write_text(str(code))
        return run if done.read_text() == "0" else None

    def close(self) -> None:
        self._forks.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relations", default=NEW)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--folder", type=Path, action="append", help="instead of examples/ and examples/techniques/")
    parser.add_argument("--iters", default="24")
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-truths-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    relations = [relation for name, relation in registry().items() if name in args.relations.split(",")]
    runs = Runs(work)
    rules: dict[str, list[Invariant]] = {}
    checked: collections.Counter[tuple[str, str]] = collections.Counter()
    false: collections.Counter[tuple[str, str]] = collections.Counter()
    failed, made = [], {}

    def judge(setting: str, pack: list[Invariant], run: Path) -> None:
        trace = Trace.load([run])
        for relation in relations:
            result = check(trace, [Pack([rule for rule in pack if rule.hypothesis.relation == relation.name])], relations={relation.name: relation})
            checked[setting, relation.name] += result.checked
            false[setting, relation.name] += len(result.violations)
            for violation in result.violations:
                print(textwrap.shorten(f"  {run.name} ({setting}): {relation.name}: {violation.text} | {violation.seen}", 300), flush=True)

    for script in scripts(args.folder or [EXAMPLES, EXAMPLES / "techniques"]):
        options = settings(script, args.iters)
        learned = [runs.record(script, name, options[name]) for name in LEARNED]
        if not all(learned):
            failed.append(script.stem)
            continue
        found, _ = infer(shards.of_runs([run for run in learned if run]), relations, options=Options())
        rules[script.stem], made[script.stem] = list(found), learned[0]
        for name, arguments in options.items():
            run = runs.record(script, name, arguments) if name not in LEARNED else None
            if run is not None and found:
                judge(name.rstrip("0123456789"), rules[script.stem], run)
        print(f"{script.stem}: {len(found)} rules {dict(collections.Counter(r.hypothesis.relation for r in found))}", flush=True)
    for stem, run in made.items():
        others = {rule.id: rule for other, several in rules.items() if other != stem for rule in several}
        if others and run is not None:
            judge("others", list(others.values()), run)
    runs.close()
    names = [relation.name for relation in relations]
    totals = collections.Counter(rule.hypothesis.relation for several in rules.values() for rule in several)
    print(f"\n{len(rules)} programs; left out: {', '.join(failed) or 'none'}\n")
    kinds = sorted({setting for setting, _ in checked})
    print("| relation | rules | " + " | ".join(kinds) + " |\n|---|---|" + "---|" * len(kinds))
    for name in names:
        print(f"| `{name}` | {totals[name]} | " + " | ".join(f"{false[kind, name]} of {checked[kind, name]}" for kind in kinds) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
