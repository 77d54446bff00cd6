"""Learn rules from healthy runs and write them to a pack.

Give it runs that went well; several of different programs make rules that carry over to others:
`proctor infer runs/mnist runs/gpt -o rules.json`

Large inferences keep what they have finished beside the pack, so that `--resume` goes on where one was interrupted,
or takes one more run in. With `--executor dask` the runs are read by a cluster.

exit code: 0 a pack was written, 2 bad usage or input, 3 nothing was learned, 101 internal error
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import TraceError, UsageError

if TYPE_CHECKING:
    from proctor.infer.engine import Progress, Report
    from proctor.infer.executors import Executor
    from proctor.invariants.pack import Provenance
    from proctor.invariants.relations import Relation

_INCONCLUSIVE = 3  # exit code: nothing was learned
# Tables of this size, on disk, are worth the start of worker processes (a second each) and the keeping of parts.
_LARGE_BYTES = 64 << 20
_GROUP_BYTES = 8 << 20  # small runs are read together
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="a healthy run, as `proctor record` wrote it"
    )
    parser.add_argument("-o", "--output", required=True, metavar="PACK", type=Path, help="the pack to write")
    parser.add_argument(
        "--relations", metavar="A,B", help="learn only these families of rules (default: all)"
    )
    parser.add_argument(
        "--requires", action="append", default=[], metavar="REQ", help="where the rules fit, as in torch>=2.6,<3; may be repeated"
    )
    parser.add_argument("--alone", action="store_true", help="learn from these runs alone; else one example is enough for a law that ships")
    parser.add_argument("--note", default="", metavar="TEXT", help="what the pack says of itself")
    work = parser.add_argument_group("large inferences")
    work.add_argument("--executor", choices=("pool", "serial", "dask"), default="pool", help="where runs are read (default: pool)")
    work.add_argument("--scheduler", default="", metavar="ADDRESS", help="of a dask cluster (default: one on this machine)")
    work.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core, one alone for small runs)")
    work.add_argument("--memory", metavar="SIZE", help="of all processes together, as in 4G (default: half of the machine's)")
    work.add_argument("--resume", action="store_true", help="reuse what an earlier inference into this pack has finished")
    work.add_argument("--work", metavar="DIR", type=Path, help="where finished parts are kept (default: PACK.parts)")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Learn, write the pack, say what was learned, and return the exit code."""
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: expected a number from 1")
    if args.output.is_dir():
        raise UsageError(
            f"{args.output}: is a directory, expected the name of a pack file", hint="-o rules.json"
        )
    requires = _requires(args.requires)
    memory = _memory(args.memory)
    chosen = _relations(args.relations)  # before the runs are read, which may take long

    from proctor.cli.infer import report as says
    from proctor.infer import shards
    from proctor.infer.engine import Options, infer
    from proctor.infer.shards.parts import Parts
    from proctor.invariants.pack import Pack, taught, write_pack
    from proctor.invariants.relations import registry
    from proctor.invariants.trace.windows import reach_of

    paths = list({path.resolve(): path for path in args.runs}.values())
    size = sum(shards.table_bytes(path) for path in paths)
    folder = args.work or args.output.with_name(args.output.name + ".parts")
    keep = bool(args.resume or args.work)
    parts = Parts(folder, reuse=keep) if keep or size >= _LARGE_BYTES else None
    jobs = _jobs(args, len(paths), size)
    group = _GROUP_BYTES if jobs == 1 and not keep else min(_GROUP_BYTES, size // (4 * jobs))
    pieces = shards.of_runs(paths, group_bytes=group, memory_bytes=memory // jobs, reach=reach_of(chosen))
    options = Options(held_bytes=memory // (4 * jobs), parts=parts, prior={} if args.alone else taught(list(registry())))
    with _executor(args, jobs) as executor, _progress(quiet=args.quiet) as progress:
        rules, report = infer(pieces, chosen, options=options, executor=executor, progress=progress)
    if not sum(run.records for run in report.runs):
        raise TraceError(
            f"{', '.join(map(str, paths))}: nothing was recorded, so there is nothing to learn",
            hint="proctor record -o RUN -- python train.py",
        )
    if not args.quiet:
        says.say_runs(report, repeated=len(args.runs) - len(paths))
    for name, error in report.errors.items():
        print(f"proctor: relation {name} failed, its rules are missing: {error}", file=sys.stderr)
    if rules:
        pack = Pack(rules, _provenance(report, args.note), requires=requires, refuted=report.refuted)
        write_pack(pack, args.output)
    if parts is not None and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    if not args.quiet:
        says.say_rules(rules, report, args.output)
    return 0 if rules else _INCONCLUSIVE


# -- what is asked ---------------------------------------------------------------------------------------------------


def _relations(names: str | None) -> list[Relation]:
    from proctor.invariants.relations import registry

    known = registry()
    if names is None:
        return list(known.values())
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown relation {', '.join(unknown)}" if unknown else "no relation named"
        raise UsageError(f"--relations {names}: {what}; known are {', '.join(known) or 'none'}")
    return [known[name] for name in wanted]


def _requires(texts: Sequence[str]) -> dict[str, str]:
    from proctor.invariants.fit import parse_requirement

    try:
        return dict(parse_requirement(text) for text in texts)
    except ValueError as e:
        raise UsageError(f"--requires: {e}") from None


def _memory(text: str | None) -> int:
    """Bytes that the inference may use."""
    if text is None:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError):
            return 4 << 30
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match is not None else 0
    if size < 64 << 20:
        raise UsageError(f"--memory {text}: expected a size from 64M, as in 4G")
    return size


def _jobs(args: argparse.Namespace, runs: int, size: int) -> int:
    if args.executor == "serial":
        return 1
    if args.jobs is not None:
        return int(args.jobs)
    enough = args.executor == "dask" or size >= _LARGE_BYTES
    return max(1, min(os.cpu_count() or 1, runs)) if enough else 1


@contextmanager
def _executor(args: argparse.Namespace, jobs: int) -> Iterator[Executor]:
    from proctor.infer.executors.serial import SerialExecutor

    executor: Executor = SerialExecutor()
    if args.executor == "dask":
        from proctor.infer.executors.dask_ import DaskExecutor

        executor = DaskExecutor(args.scheduler, workers=jobs)
    elif args.scheduler:
        raise UsageError(f"--scheduler {args.scheduler}: is for --executor dask")
    elif jobs > 1:
        from proctor.infer.executors.pool import PoolExecutor

        executor = PoolExecutor(jobs)
    try:
        yield executor
    finally:
        executor.close()


def _provenance(report: Report, note: str) -> Provenance:
    from datetime import UTC, datetime

    from proctor import __version__
    from proctor.invariants.pack import Provenance

    libraries: dict[str, set[str]] = {}
    for run in report.runs:
        for name, versions in run.libraries.items():
            libraries.setdefault(name, set()).update(versions)
    known = {name: ", ".join(sorted(versions)) for name, versions in sorted(libraries.items())}
    return Provenance(
        tool=f"proctor {__version__}",
        torch=known.pop("torch", ""),
        runs=len(report.runs),
        programs=sorted({run.program for run in report.runs}),
        records=sum(run.records for run in report.runs),
        sources=tuple(sorted({source for run in report.runs for source in run.sources})),
        libraries=known,
        command="proctor infer",
        made=datetime.now(UTC).strftime("%Y-%m-%d"),
        note=note,
    )


# -- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    """A bar a stage on a terminal, one line a stage elsewhere; both on standard error."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():

        def line(stage: str, done: int, total: int) -> None:
            if done == 0 and total:
                print(f"{stage}: {total:,}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance
