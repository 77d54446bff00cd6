"""The healthy programs that shipped packs are made from, and their recordings: our examples, and public programs of the first half.

Used by `make_packs.py`. A program is recorded once a setting; what lies in the folder of an earlier call is used again. Programs that start ranks of
their own run in processes of their own, all others in forks of one process that has imported torch (`forks.py`). A public program whose failure was found to
be a bug of its own (`bug` in its manifest) is no healthy one and is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import msgspec
from evaluation import Bench, Program
from forks import Forks
from truths import Wild

from benchmarks.wild.attempt import importable
from benchmarks.wild.manifest import read_corpus
from proctor.invariants.fit import called, said
from proctor.invariants.trace import Trace

OWN = ("seed0", "size", "batch", "lr", "seed1")  # in the order in which they are taken
PUBLIC = ("seed0", "batch")
_STARTS_RANKS = ("init_process_group", "mp.spawn", "PartialState", "notebook_launcher", "torch.multiprocessing")


@dataclass(frozen=True)
class Member:
    """One program and its recordings.

    Args:
        name: unique among the members.
        area: of the pack that it teaches.
        runs: by setting; those that ended well.
        project: of a stranger's program, else "".
    """

    name: str
    area: str
    runs: Mapping[str, Path]
    project: str = ""


def own(bench: Bench, programs: Iterable[Program], number: int, libraries: Iterable[str], *, record: bool) -> list[Member]:
    """Our examples in at most so many settings; those whose library is not installed are left out."""
    listed = list(programs)
    chosen = {p.name: [s for s in OWN if s in p.settings()][:number] for p in listed}
    if record:
        start = bench.work / "start.py"
        bench.work.mkdir(parents=True, exist_ok=True)
        start.write_text("def begin(torch):\n    torch.set_num_threads(1)\n")
        forks = Forks(start, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, timeout_s=900, memory_mib=16_384)
        for program in listed:
            for setting in chosen[program.name]:
                if any(word in program.script.read_text() for word in _STARTS_RANKS):
                    bench.record(program, setting)
                elif not bench.there(program, setting):
                    run = bench.recording(program, setting)
                    run.parent.mkdir(parents=True, exist_ok=True)
                    arguments = ["--iters", str(bench.iters), *program.settings()[setting]]
                    code = forks.run(str(program.script), arguments, program.script.parent, run.with_suffix(".log"), {}, record=run)
                    if code == 0:
                        (run / "done").touch()
            print(f"recorded: {program.name} ({', '.join(bench.settings(program))})", flush=True)
        forks.close()
    kept = [program for program in listed if bench.there(program, "seed0")]
    return [
        Member(
            program.name, area([bench.recording(program, "seed0")], libraries),
            {s: bench.recording(program, s) for s in bench.settings(program) if s in chosen[program.name]},
        )
        for program in kept
    ]  # fmt: skip


def public(work: Path, checkouts: Path, number: int, libraries: Iterable[str], *, record: bool) -> list[Member]:
    """Public programs of one rank of the first half, at most so many of a project, whose checkouts are there; what does not end with 0 is left out."""
    work.mkdir(parents=True, exist_ok=True)
    projects = [p for p in read_corpus() if p.half == "first" and (checkouts / p.name).is_dir()]
    source = Wild(work, checkouts, {p.name for p in projects}) if record else None
    members = []
    for project in projects:
        able = [p for p in project.programs if not p.skip and not p.bug and p.launcher == "python" and all(map(importable, p.needs))]
        taken = 0
        for program in able:
            runs = {}
            for setting in PUBLIC if taken < number else ():
                run = work / f"{program.name}-{setting}"
                done = run.with_suffix(run.suffix + ".done")
                if source is not None and not done.exists():
                    done.write_text(str(source.run(program.name, setting, run)))
                if done.exists() and done.read_text() == "0" and any((run / "procs").glob("*")):
                    runs[setting] = run
                elif setting == PUBLIC[0]:
                    break  # it does not run here: no second try
            if PUBLIC[0] in runs:
                taken += 1
                members.append(Member(program.name, area([runs[PUBLIC[0]]], libraries), runs, project.name))
                print(f"recorded: {program.name} ({', '.join(runs)})" if record else "", end="\n" if record else "", flush=True)
    if source is not None:
        source.close()
    return members


def area(runs: Iterable[Path], libraries: Iterable[str]) -> str:
    """`distributed` for what runs on several ranks, else the first of these libraries that was used, else `torch`; a library's pack takes its programs of several ranks, too.

    A library that others import (transformers imports peft) was used where its functions were called.
    """
    found = list(runs)
    processes = [msgspec.json.decode(path.read_bytes()) for run in found for path in sorted(run.glob("procs/*/process.json"))]
    used = {name for process in processes for name in said(process)}
    there = [name for name in libraries if name in used]
    if len(there) > 1:
        there = [name for name in there if name in called(name for run in found for name in Trace.load([run]).functions)] or there
    return there[0] if there else "distributed" if len(processes) > 1 else "torch"
