"""Plants, runs, records and judges, and keeps one JSON file a mutant."""

from __future__ import annotations

import ast
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import judge
from .programs import Program, prepare
from .registry import Operator, Plant
from .table import SOURCES


class Runs(Protocol):
    """What runs a program; `programs.Warm`."""

    def run(
        self, program: Program, folder: Path, seed: int, *, digest: Path | None = None, operator: str = "", record: Path | None = None
    ) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Mutant:
    """A program, an operator and the place where it is planted: `index` counts the places in the program's sources."""

    program: Program
    operator: Operator
    index: int = 0

    @property
    def id(self) -> str:
        return f"{self.program.name}--{self.operator.name}--{self.index}"


class Matrix:
    """All mutants of some programs by some operators.

    Args:
        checkouts: the folder of the programs' checkouts.
        work: scratch; nothing is written elsewhere.
        rejudge: check the recordings that are there again.
    """

    def __init__(
        self, programs: Sequence[Program], operators: Mapping[str, Operator], checkouts: Path, work: Path, runs: Runs, *, rejudge: bool = False
    ) -> None:
        self._programs, self._operators = list(programs), dict(operators)
        self._checkouts, self._work, self._runs, self._rejudge = checkouts, work, runs, rejudge
        self._baselines: dict[str, dict[str, Any]] = {}
        self._fresh: set[Path] = set()  # packs that this call has learned

    def run(self, sample: int, seed: int, until: float = float("inf"), number: int | None = None) -> list[dict[str, Any]]:
        """Run a sample of mutants of the first `number` programs that are ready; what an earlier call has finished is read."""
        ready = (p for p in self._programs if self._baseline(p)["state"] == "ready")
        self._programs = list(itertools.islice(ready, number))
        chosen = choose(self._programs, self._operators, self._sources, sample, seed)
        results = []
        for mutant in chosen:
            kept = self._work / "mutants" / f"{mutant.id}.json"
            result = json.loads(kept.read_text()) if kept.exists() else None
            if (result is None or (self._rejudge and result["state"] == "counts")) and time.monotonic() < until:
                result = self._again(mutant, result) if result else self._examine(mutant)
                _write(kept, result)
                _say(result)
            if result is not None:
                results.append(result)
        return results

    def _sources(self, program: Program) -> dict[str, str]:
        folder = self._home(program) / "clean"
        return {name: (folder / name).read_text() for name in program.files}

    def _home(self, program: Program) -> Path:
        return self._work / "programs" / program.name

    def _baseline(self, program: Program) -> dict[str, Any]:
        """A clean program is ready when it ends well and computes the same twice; it is recorded with two seeds."""
        if program.name in self._baselines:
            return self._baselines[program.name]
        kept = self._home(program) / "baseline.json"
        if kept.exists():
            found: dict[str, Any] = json.loads(kept.read_text())
        else:
            found = self._prepared(program)
            _write(kept, found)
            print(f"{program.name}: {found['state']} {found['why'][-300:]}", file=sys.stderr, flush=True)
        self._baselines[program.name] = found
        return found

    def _prepared(self, program: Program) -> dict[str, Any]:
        home = self._home(program)
        home.mkdir(parents=True, exist_ok=True)
        try:
            prepare(program, self._checkouts, home / "clean")
        except (OSError, ValueError) as error:
            return {"state": "not prepared", "why": str(error)}
        seen = []
        for again in ("digest", "digest-again"):
            code, said = self._attempt(program, home / "clean", home / "try", 0, digest=home / again)
            if code:
                return {"state": f"exit {code}", "why": said[-1500:]}
            seen.append(judge.events(home / again)[0])
        if not any(seen[0].values()) or judge.difference(*seen):
            return {"state": "not repeatable", "why": f"{judge.difference(*seen)}"}
        for seed in (0, 1):
            code, said = self._attempt(program, home / "clean", home / "try", seed, record=home / f"run-{seed}")
            if code:
                return {"state": f"recorded: exit {code}", "why": said[-1500:]}
        return {"state": "ready", "why": ""}

    def _attempt(self, program: Program, source: Path, folder: Path, seed: int, **options: Any) -> tuple[int, str]:
        """Run in a fresh copy, so that no run finds what another has saved."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        code, said = self._runs.run(program, folder, seed, **options)
        shutil.rmtree(folder, ignore_errors=True)
        return code, said

    def _examine(self, mutant: Mutant) -> dict[str, Any]:
        program, operator = mutant.program, mutant.operator
        home = self._home(program)
        scratch = self._work / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(home / "clean", scratch)
        result: dict[str, Any] = {"id": mutant.id, "program": program.name, "operator": operator.name, "kind": operator.kind}
        result["place"] = place(self._sources(program), mutant, scratch)
        planted = operator.name if operator.kind == "process" else ""
        digest = self._work / "digest"
        code, said = self._attempt(program, scratch, self._work / "try", 0, digest=digest, operator=planted)
        seen, fired = judge.events(digest)
        if code:
            return {**result, "state": "too long" if code == 124 else "fails", "why": said[-500:]}
        if planted and fired < 0:
            return {**result, "state": "never acts"}
        first = judge.difference(judge.events(home / "digest")[0], seen)
        if first is None:
            return {**result, "state": "equal"}
        result |= {"trigger": first[0], "effect": first[1]}
        record = self._work / "recordings" / mutant.id
        code, said = self._attempt(program, scratch, self._work / "try", 0, operator=planted, record=record)
        if code:
            return {**result, "state": "fails recorded", "why": said[-500:]}
        return self._again(mutant, {**result, "state": "counts"})

    def _again(self, mutant: Mutant, result: dict[str, Any]) -> dict[str, Any]:
        """Judge a recorded mutant."""
        record = self._work / "recordings" / mutant.id
        result["sources"], result["errors"] = {}, {}
        for source in SOURCES:
            pack = self._pack(mutant.program, source)
            found = check(record, pack)
            result["sources"][source] = judge.verdict(found, self._clean(mutant.program, source, pack), result["place"], result["trigger"])
            result["errors"][source] = found[:20]
        return result

    def _clean(self, program: Program, source: str, pack: Path | None) -> list[dict[str, Any]]:
        kept = self._home(program) / f"clean-{source}.json"
        if not kept.exists() or (self._rejudge and kept not in self._fresh):
            self._fresh.add(kept)
            _write(kept, check(self._home(program) / "run-0", pack))
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found

    def _pack(self, program: Program, source: str) -> Path | None:
        """The rules of a source; `None` stands for the shipped packs."""
        if source == "shipped":
            return None
        pack = self._home(program) / f"{source}.pack.json"
        if not pack.exists() or (self._rejudge and pack not in self._fresh):
            self._fresh.add(pack)
            runs = [self._home(program) / "run-1"]
            if source == "others":
                runs = [self._home(p) / "run-0" for p in others(program, self._programs)]
            infer(runs, pack)
        return pack


def others(program: Program, programs: Sequence[Program], seed: int = 0) -> list[Program]:
    """Two other programs, of other scripts; for a program of several ranks at least one of several, if there is one."""
    able = [p for p in programs if (p.repository, p.root, p.script) != (program.repository, program.root, program.script)]
    random.Random(f"{seed} {program.name}").shuffle(able)
    able.sort(key=lambda p: program.ranks > 1 and p.ranks == 1)
    return able[:2]


def choose(
    programs: Sequence[Program], operators: Mapping[str, Operator], sources: Any, sample: int, seed: int
) -> list[Mutant]:
    """A sample of mutants, spread over operators first and over programs next; a larger sample begins with the smaller one."""
    rng = random.Random(seed)
    queues: list[list[Mutant]] = []
    for operator in operators.values():
        queue = []
        for program in programs:
            found = [o for o in range(len(_plants(sources(program), operator)))] if program.ranks >= operator.ranks else []
            if found:
                queue.append(Mutant(program, operator, rng.choice(found)))
        rng.shuffle(queue)
        queues.append(queue)
    rng.shuffle(queues)
    chosen: list[Mutant] = []
    for turn in range(len(programs)):
        chosen += [queue[turn] for queue in queues if turn < len(queue)]
    return chosen[:sample]


def _plants(sources: Mapping[str, str], operator: Operator) -> list[tuple[str, ast.Module | None, Plant | None]]:
    """The places of an operator in a program's files; a process operator has one, in no file."""
    if operator.sites is None:
        return [("", None, None)] if any(operator.applies(text, 1 << 16) for text in sources.values()) else []
    found: list[tuple[str, ast.Module | None, Plant | None]] = []
    for name, text in sources.items():
        count = len(list(operator.sites(ast.parse(text))))
        for i in range(count):
            tree = ast.parse(text)
            found.append((name, tree, list(operator.sites(tree))[i]))
    return found


def place(sources: Mapping[str, str], mutant: Mutant, folder: Path) -> dict[str, Any]:
    """Plant a syntax operator into the files in this folder; gives what a report may call the place."""
    file, tree, plant = _plants(sources, mutant.operator)[mutant.index]
    words = list(mutant.operator.words)
    if tree is None or plant is None:
        return {"file": "", "line": 0, "function": "", "words": words}
    plant.apply()
    (folder / file).write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    function = plant.function.split(".")[-1]
    around = [function] if function not in ("", "main", "forward", "__init__") else []
    return {"file": file, "line": plant.line, "function": plant.function, "words": [*dict.fromkeys([*words, *plant.words, *around])]}


def infer(runs: list[Path], pack: Path) -> None:
    """`proctor infer`; a second process is not worth its start."""
    from proctor.cli import main

    code = main(["infer", "-q", "--executor", "serial", *map(str, runs), "-o", str(pack)])
    if code:
        raise RuntimeError(f"infer: exit {code}")


def check(run: Path, pack: Path | None) -> list[dict[str, Any]]:
    """The errors that `proctor check` reports."""
    from proctor.cli import main

    out = run.parent / f"{run.name}.report.json"
    chosen = ["-i", str(pack)] if pack else []
    code = main(["check", str(run), *chosen, "-q", "--format", "json", "-o", str(out), "--fail-on", "never"])
    if code not in (0, 3):
        raise RuntimeError(f"check {run}: exit {code}")
    return judge.errors(json.loads(out.read_text()))


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)  # whole or not at all: a later call reads it


def _say(result: dict[str, Any]) -> None:
    marks = " ".join(
        f"{s}:{''.join(k[0] if v[k] else '-' for k in ('found', 'named', 'timely'))}" for s, v in result.get("sources", {}).items()
    )
    print(f"{time.strftime('%H:%M:%S')} {result['id']}: {result['state']} {marks}", file=sys.stderr, flush=True)
