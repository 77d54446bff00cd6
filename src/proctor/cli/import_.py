"""Bring traces and rules of another tool.

    proctor import traincheck DIR -o RUN               TrainCheck's traces, as `traincheck-collect` wrote them
    proctor import traincheck-invariants FILE… -o PACK its invariants, as `traincheck-infer` wrote them

Then `proctor check RUN -i PACK` gives TrainCheck's verdicts, and `proctor report RUN` a page. Traces may be gzipped
and of any size.

exit code: 0 written, 2 bad usage or input, 101 internal error
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from proctor.errors import UsageError

_FORMATS = ("traincheck", "traincheck-invariants")
_SHOWN = 5  # rules that were left out


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("format", choices=_FORMATS, help="what to read")
    parser.add_argument("source", nargs="+", type=Path, metavar="SOURCE", help="a folder of traces, or files of rules")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", type=Path, help="the run or the pack to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that lies there")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Read, write, say what was brought, and return the exit code."""
    said = _traces(args) if args.format == "traincheck" else _rules(args)
    if not args.quiet:
        print("\n".join(f"proctor: {line}" for line in said), file=sys.stderr)
    return 0


def _traces(args: argparse.Namespace) -> list[str]:
    from proctor.infer.importers.traincheck.run import import_run
    from proctor.verify.wording import count

    if len(args.source) != 1:
        raise UsageError("one folder of traces makes one run", hint="proctor import traincheck DIR -o RUN")
    progress = None if args.quiet or not sys.stderr.isatty() else _progress
    done = import_run(args.source[0], args.output, overwrite=args.overwrite, progress=progress)
    if progress is not None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    read = f"{count(done.records, 'record')} from {count(done.files, 'file')}"
    head = f"{read}, of {done.processes} process{'' if done.processes == 1 else 'es'}, in {args.output}"
    return [head, *done.notes]


def _rules(args: argparse.Namespace) -> list[str]:
    from proctor.infer.importers.traincheck.rules import import_rules
    from proctor.invariants.pack import write_pack
    from proctor.verify.wording import count

    if args.output.is_dir():
        raise UsageError(f"{args.output}: is a directory, expected the name of a pack file", hint="-o rules.json")
    done = import_rules(args.source)
    write_pack(done.pack, args.output)
    twice = f", {done.twice} of them more than once" if done.twice else ""
    said = [f"{count(done.read, 'rule')}{twice}, in {args.output}"]
    if done.skipped:
        said.append(f"{count(len(done.skipped), 'rule')} left out:")
        said += done.skipped[:_SHOWN]
    return said


def _progress(records: int) -> None:
    print(f"\r\x1b[Kproctor: {records} records", end="", file=sys.stderr, flush=True)
