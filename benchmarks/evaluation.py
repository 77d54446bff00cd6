"""False alarms on healthy programs in the three settings of TrainCheck §5.3–5.4; writes the table of docs/evaluation.md.

    python benchmarks/evaluation.py [--work DIR] [--iters 20] [--only SUBSTRING] [--relations A,B] [--write]

Programs: `examples/`, `examples/techniques/`, `examples/libraries/` (those whose library is installed). The last line of
a docstring names the class: vision, language, …. Rules are learned from two seeds of a program and checked:

* cross-configuration: on another seed, size, learning rate and batch size of the same program;
* cross-pipeline: learned from half of the programs of a class (at most six), checked on its other programs;
* cross-class: the same rules, checked on every program of the other classes.

A rule is *checked* on a run when its precondition held there at least once; every violation on a healthy run is false.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from exam import PROCTOR, run

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("examples", "examples/techniques", "examples/libraries")
NOT_PROGRAMS = {"demo.py"}
SIZES = (("--width", "48"), ("--hidden", "48"), ("--channels", "12"), ("--dim", "48"))
MISSING_LIBRARY = 77
LEARNED = 6  # programs of a class that rules are learned from, at most
BEGIN, END = "<!-- false-alarms -->", "<!-- /false-alarms -->"


@dataclass(frozen=True)
class Program:
    script: Path
    kind: str

    @property
    def name(self) -> str:
        return self.script.stem

    def settings(self) -> dict[str, list[str]]:
        """Arguments of every configuration; `seed0` and `seed1` are those that rules are learned from."""
        text = self.script.read_text()
        found = {"seed0": [], "seed1": ["--seed", "1"]}
        size = next(([option, value] for option, value in SIZES if f'"{option}"' in text), None)
        if size:
            found["size"] = ["--seed", "3", *size]
        if '"--lr"' in text:
            found["lr"] = ["--seed", "4", "--lr", "0.002"]
        if '"--batch-size"' in text:
            found["batch"] = ["--seed", "5", "--batch-size", "12"]
        return found


@dataclass
class Tally:
    """What one setting gave."""

    runs: int = 0
    checked: int = 0
    untriggered: int = 0
    false: int = 0
    paging: int = 0  # incidents that would have paged somebody
    relations: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        self.checked += other.checked
        self.untriggered += other.untriggered
        self.false += other.false
        self.paging += other.paging
        self.relations += other.relations

    @property
    def rate(self) -> str:
        return f"{100 * self.false / max(self.checked, 1):.2f} %"


def programs(only: str) -> list[Program]:
    found = []
    for folder in FOLDERS:
        for script in sorted((ROOT / folder).glob("*.py")):
            kind = re.search(r"^Class: (\w+)", script.read_text(), re.MULTILINE)
            if script.name not in NOT_PROGRAMS and only in script.name:
                found.append(Program(script, kind[1] if kind else "other"))
    return found


class Bench:
    """Recordings and packs in one folder; what lies there already is used again."""

    def __init__(self, work: Path, iters: int, relations: str) -> None:
        self.work, self.iters, self.relations = work, iters, relations
        self.skipped: dict[str, str] = {}

    def recording(self, program: Program, setting: str) -> Path:
        return self.work / "runs" / f"{program.name}-{setting}"

    def record(self, program: Program, setting: str) -> None:
        out = self.recording(program, setting)
        if (out / "done").exists():
            return
        command = [*PROCTOR, "record", "--overwrite", "-o", str(out), "--", sys.executable, str(program.script)]
        try:
            done = run([*command, "--iters", str(self.iters), *program.settings()[setting]], timeout_s=900)
        except subprocess.TimeoutExpired:
            self.skipped[f"{program.name} ({setting})"] = "more than 15 minutes"
            return
        if done.returncode == MISSING_LIBRARY:
            self.skipped[program.name] = "its library is not installed"
        elif done.returncode:
            self.skipped[f"{program.name} ({setting})"] = (done.stderr.strip().splitlines() or ["?"])[-1][:160]
        else:
            (out / "done").touch()

    def there(self, program: Program, setting: str) -> bool:
        return (self.recording(program, setting) / "done").exists()

    def settings(self, program: Program) -> list[str]:
        """Those that were recorded."""
        return [s for s in program.settings() if self.there(program, s)]

    def infer(self, name: str, learned: Sequence[Program], settings: Sequence[str] = ("seed0", "seed1"), *, options: Sequence[str] = ()) -> Path:
        pack = self.work / f"{name}.json"
        pack.unlink(missing_ok=True)
        runs = [str(self.recording(p, s)) for p in learned for s in self.settings(p) if s in settings]
        chosen = ["--relations", self.relations] if self.relations else []
        done = run([*PROCTOR, "infer", "-q", *options, *chosen, *runs, "-o", str(pack)])
        if done.returncode:
            raise RuntimeError(f"infer {name}: exit {done.returncode}\n{done.stderr[-2000:]}")
        return pack

    def check(self, pack: Path, tries: Iterable[tuple[Program, str]], label: str) -> Tally:
        """False alarms of one pack on some healthy runs; each is printed."""
        from proctor.invariants.pack import read_pack
        from proctor.invariants.relations import registry
        from proctor.invariants.trace import Trace
        from proctor.verify.checker import check

        tally = Tally()
        if not pack.exists():  # nothing was learned
            return tally
        rules = read_pack(pack, list(registry()))
        tiers = {rule.id: str(getattr(rule, "tier", "ticket")) for rule in rules.invariants}
        for program, setting in tries:
            if not self.there(program, setting):
                continue
            result = check(Trace.load([self.recording(program, setting)]), [rules])
            tally.runs += 1
            tally.checked += result.checked
            tally.untriggered += result.not_triggered
            tally.false += len(result.violations)
            tally.paging += sum(any(tiers.get(v.id) == "page" for v in i.violations) for i in result.incidents)
            for v in result.violations:
                tally.relations[v.relation] += 1
                print(f"  {label}: {program.name} ({setting}): {v.relation}: {v.text} | seen {v.seen} | {v.when}"[:400])
        return tally


def split(members: list[Program], rng: random.Random) -> tuple[list[Program], list[Program]]:
    """Half of a class to learn from, at most `LEARNED`, and the rest."""
    shuffled = members[:]
    rng.shuffle(shuffled)
    n = min(LEARNED, (len(shuffled) + 1) // 2)
    return shuffled[:n], shuffled[n:]


def evaluate(bench: Bench, everything: list[Program], rounds: int) -> tuple[dict[str, Tally], list[tuple[str, ...]]]:
    total = {"cross-configuration": Tally(), "cross-pipeline": Tally(), "cross-class": Tally()}
    rows: list[tuple[str, ...]] = []
    for program in everything:
        others = [s for s in program.settings() if s not in ("seed0", "seed1")]
        pack = bench.infer(f"config-{program.name}", [program])
        total["cross-configuration"].add(bench.check(pack, [(program, s) for s in others], "cross-configuration"))
    classes: dict[str, list[Program]] = collections.defaultdict(list)
    for program in everything:
        classes[program.kind].append(program)
    for round_number in range(rounds):
        rng = random.Random(round_number)
        for kind, members in sorted(classes.items()):
            learned, held_out = split(members, rng)
            pack = bench.infer(f"class-{kind}-{round_number}", learned)
            inside = bench.check(pack, [(p, "seed0") for p in held_out], f"cross-pipeline {kind}")
            strangers = [p for p in everything if p.kind != kind]
            outside = bench.check(pack, [(p, "seed0") for p in strangers], f"cross-class {kind}")
            total["cross-pipeline"].add(inside)
            total["cross-class"].add(outside)
            rules = len(json.loads(pack.read_text())["invariants"]) if pack.exists() else 0
            rows.append(
                (kind, str(round_number), f"{len(learned)} of {len(members)}", str(rules),
                 f"{inside.false} of {inside.checked}", f"{outside.false} of {outside.checked}")
            )
            print(f"{kind} round {round_number}: {rules} rules; cross-pipeline {rows[-1][-2]}, cross-class {rows[-1][-1]}", flush=True)
    return total, rows


def markdown(total: dict[str, Tally], rows: list[tuple[str, ...]], everything: list[Program], bench: Bench) -> str:
    lines = [
        f"{len(everything)} healthy programs, {sum(t.runs for t in total.values())} checks of a pack on a run.",
        "",
        "| setting | runs | rules checked | false alarms | rate | paging incidents |",
        "|---|---|---|---|---|---|",
    ]
    for name, t in total.items():
        lines.append(f"| {name} | {t.runs} | {t.checked:,} | {t.false} | {t.rate} | {t.paging} |")
    lines += ["", "| class | round | learned from | rules | cross-pipeline | cross-class |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    blame: collections.Counter[str] = sum((t.relations for t in total.values()), collections.Counter())
    lines += ["", "By relation: " + (", ".join(f"`{k}` {n}" for k, n in blame.most_common()) or "none") + "."]
    if bench.skipped:
        lines += ["", "Not run: " + "; ".join(f"{k}: {why}" for k, why in sorted(bench.skipped.items())) + "."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="recordings and packs are kept here")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="random halves of each class")
    parser.add_argument("--jobs", type=int, default=2, help="recordings at a time")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--relations", default="")
    parser.add_argument("--record-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evaluation.md")
    args = parser.parse_args()
    bench = Bench(args.work or Path(tempfile.mkdtemp(prefix="proctor-evaluation-")), args.iters, args.relations)
    everything = programs(args.only)
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda pair: bench.record(*pair), [(p, s) for p in everything for s in p.settings()]))
    everything = [p for p in everything if bench.there(p, "seed0")]
    print(f"{len(everything)} programs recorded in {time.monotonic() - started:.0f} s", flush=True)
    for name, why in sorted(bench.skipped.items()):
        print(f"  not run: {name}: {why}")
    if args.record_only:
        return 0
    table = markdown(*evaluate(bench, everything, args.rounds), everything, bench)
    print("\n" + table)
    if args.write:
        page = ROOT / "docs" / "evaluation.md"
        text = page.read_text()
        head, _, rest = text.partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
