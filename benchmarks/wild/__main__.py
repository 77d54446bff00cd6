"""Healthy public training programs under Proctor: every error on one of them is a false alarm.

    python -m benchmarks.wild WILD [--half first|second] [--only TEXT] [--number N] [--jobs N] [--write]
    python -m benchmarks.wild WILD --warm         # recorded and checked only: no page, no `watch`, a tenth of the time
    python -m benchmarks.wild WILD --budget 1%    # under `watch` with a budget, of which only the first two steps are free; programs run ten times as long
    python -m benchmarks.wild WILD --table        # of what was run before
    python -m benchmarks.wild WILD --suites       # libraries' own tests, bare and attached

WILD is a folder of checkouts, `owner+name` each; what is missing is fetched by git. Programs are not changed: `shims/` gives
synthetic data under the loaders' real names and ends them after a few updates. Results lie in WILD/results/COMMIT, one
JSON a program, and are not made again; COMMIT is the last one that changed the product. The second half of the projects is
held: only its figures are looked at, and no rule is repaired by it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.wild.attempt import Result, Warm, attempt
from benchmarks.wild.checkout import checkout
from benchmarks.wild.manifest import ManifestError, Program, Project, read_corpus
from benchmarks.wild.table import as_json, records, text, write_section

ROOT: Final = Path(__file__).resolve().parents[2]
PRODUCT: Final = ("src", "native", "invariants", "instrument", "infer", "verify", "oracle")
LONGER: Final = 10  # times as many updates under a budget: fewer would be looked at in full


def product() -> str:
    """Commit by which results are kept: the last that changed what is measured."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", *PRODUCT], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def read_results(folder: Path, programs: Iterable[Program]) -> list[Result]:
    """Those that are there and whole; others count as not run yet."""
    found = []
    for program in programs:
        try:
            found.append(msgspec.json.decode((folder / f"{program.name}.json").read_bytes(), type=Result))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def chosen(projects: Sequence[Project], half: str, only: str) -> list[Program]:
    """Programs of one half, or both, whose name holds a text; of all projects in turn, so that few are soon diverse."""
    lists = [[p for p in project.programs if half in ("", p.half) and only in p.name] for project in projects]
    longest = max((len(programs) for programs in lists), default=0)
    return [programs[i] for i in range(longest) for programs in lists if i < len(programs)]


def run_all(
    programs: Sequence[Program], projects: Sequence[Project], wild: Path, folder: Path, version: str, jobs: int, warm: Warm | None = None,
    options: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run what has no result yet, and say each in one line."""
    by_name = {p.name: p for p in projects}
    places: dict[str, tuple[Path | None, str]] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def one(program: Program) -> None:
        place, trouble = places[program.project]
        work = folder / "work" / program.name
        if place is None:
            print(f"{program.name}: {trouble}", flush=True)
            return
        result = attempt(program, place, work, version, warm, options)
        part = folder / f"{program.name}.json.part"
        part.write_bytes(msgspec.json.encode(result))
        part.replace(folder / f"{program.name}.json")
        if result.state != "crashed" and not result.errors and not result.pages and result.bits != "differ":
            shutil.rmtree(work, ignore_errors=True)
        print(line(result), flush=True)

    done = {r.name for r in read_results(folder, programs)}
    waiting = [p for p in programs if p.name not in done]
    for name in dict.fromkeys(p.project for p in waiting if not p.skip):
        places[name] = checkout(by_name[name], wild)
        if places[name][1]:
            print(places[name][1], file=sys.stderr)
    for name in {p.project for p in waiting} - places.keys():
        places[name] = (wild / name, "")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, waiting))
    if warm is not None:
        warm.close()


def line(result: Result) -> str:
    """What came out of one program; of the second half no more than the state."""
    if result.state not in ("healthy", "crashed"):
        last = (result.why.strip().splitlines() or ["?"])[-1]
        return f"{result.name}: {result.state}: {last[:160]}"
    said = [f"{len(result.errors)} errors", f"{result.pages} pages", f"bits {result.bits}"]
    if not result.recorded:
        said.append("never recorded")
    if result.state == "crashed":
        said.append(result.why.strip().splitlines()[0][:160])
    head = f"{result.name}: {', '.join(said)}"
    if result.half == "second":
        return head
    return "\n".join([head, *(f"    {v['tier']} {v['relation']} {v['rule']}: {v['text']} | seen {v['seen']} | step {v['step']}" for v in result.errors)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wild", type=Path, help="folder of checkouts")
    parser.add_argument("--half", choices=("first", "second"), default="", help="projects to run (default: all)")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--number", type=int, default=0, help="at most so many programs")
    parser.add_argument("--warm", action="store_true", help="record in forks of one process and check, where processes of their own and `watch` take too long")
    parser.add_argument("--budget", metavar="SHARE", help="watch with such a budget")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once")
    parser.add_argument("--results", type=Path, help="folder of results (default WILD/results)")
    parser.add_argument("--also", type=Path, action="append", default=[], help="with --table: folder of results of another commit, for programs that have none of this one")
    parser.add_argument("--list", action="store_true", help="name the programs and run none")
    parser.add_argument("--table", action="store_true", help="only the table of what was run")
    parser.add_argument("--suites", action="store_true", help="the libraries' own tests, bare and attached")
    parser.add_argument("--write", action="store_true", help="write the section of docs/evaluation.md")
    args = parser.parse_args()
    if not args.wild.is_dir():
        print(f"{args.wild}: no such folder of checkouts; make an empty one and name it", file=sys.stderr)
        return 2
    try:
        projects = read_corpus()
    except ManifestError as error:
        print(error, file=sys.stderr)
        return 2
    programs = chosen(projects, args.half, args.only)
    if args.list:
        for program in programs:
            print(f"{program.half:6} {program.name}{'  (skipped: ' + program.skip + ')' if program.skip else ''}")
        print(f"{len(programs)} programs, {sum(not p.skip for p in programs)} of them not skipped, {len({p.project for p in programs})} projects")
        return 0
    version = product()
    way = "-warm" if args.warm else f"-{args.budget}" if args.budget else ""
    folder = (args.results or args.wild / "results") / f"{version}{way}"
    if args.suites:
        from benchmarks.wild.suites import run_suites

        return run_suites(args.wild.resolve(), folder.resolve(), args.only, ROOT / "docs" / "evaluation.md" if args.write else None)
    programs = programs[: args.number or None]
    options = ["--budget", args.budget, "--warmup", "2"] if args.budget else []
    if args.budget:
        programs = [msgspec.structs.replace(p, steps=LONGER * p.steps) for p in programs]
    if not args.table:
        run_all(programs, projects, args.wild.resolve(), folder.resolve(), version, 1 if args.warm else max(args.jobs, 1), Warm() if args.warm else None, options)
    results = read_results(folder, programs)
    for other in args.also if args.table else ():
        known = {r.name for r in results}
        results += [r for r in read_results(other, programs) if r.name not in known]
    told = text(results, sorted({r.product for r in results} or {version}))
    print(told)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.json").write_text(json.dumps(as_json(results), indent=1) + "\n")
    for half in {p.half for p in programs} if not args.also else ():
        made = records((r for r in results if r.half == half), f"wild, {half} half, Proctor {version}")
        (folder / f"records-{half}.json").write_text(json.dumps(made, indent=1) + "\n")
    if args.write:
        write_section(ROOT / "docs" / "evaluation.md", told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
