"""Check a recorded run against packs of rules, and report what was violated.

Always writes RUN/report.html, RUN/violations.jsonl and RUN/check.json beside the run when it is writable.

Violations that are suppressed, or known from a baseline, are counted and shown and do not fail the check.

exit code: 0 clean, 1 violations at or above --fail-on, 2 bad usage or input, 3 inconclusive (nothing could be
checked, or a rank is missing), 101 internal error
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.inputs import add_packs, run_and_packs
from proctor.cli._parts.project import set_defaults
from proctor.errors import ProctorError, UsageError
from proctor.verify.service.settings import LEVELS

if TYPE_CHECKING:
    from proctor.verify.report import Report


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from proctor.verify.report import FORMATS

    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="directory that `proctor record` wrote")
    add_packs(parser)
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: terminal")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report there instead of to the terminal")
    parser.add_argument("--fail-on", choices=LEVELS, default="error", help="least severity that makes the exit code 1")
    parser.add_argument("--all", action="store_true", dest="everything", help="show every violated rule")
    parser.add_argument(
        "--suppressions", metavar="FILE", action="append", default=[], help="rules whose violations are expected (proctor pack suppress)"
    )
    parser.add_argument("--baseline", metavar="FILE", help="violations that an earlier check wrote are no news")
    parser.add_argument("--write-baseline", metavar="FILE", help="write the violations of this check as a baseline")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    set_defaults(parser, "check")


def run(args: argparse.Namespace) -> int:
    """Check, write the reports, and return the exit code."""
    folder, pack_paths = run_and_packs(args)
    report = examine(
        folder,
        pack_paths,
        fail_on=args.fail_on,
        everything=args.everything,
        quiet=args.quiet,
        suppressions=[Path(f) for f in args.suppressions],
        baseline=Path(args.baseline) if args.baseline else None,
    )
    from proctor.verify.report.keep import keep

    report, trouble = keep(report, folder)
    if args.write_baseline:
        _write_baseline(report, Path(args.write_baseline))
    _deliver(report, args)
    if trouble:
        print(f"proctor: {trouble}", file=sys.stderr)
    return report.exit_code


def examine(
    folder: Path,
    pack_paths: list[Path],
    *,
    fail_on: str,
    everything: bool = False,
    quiet: bool = True,
    suppressions: Sequence[Path] = (),
    baseline: Path | None = None,
) -> Report:
    """Load a run and its packs, and check.

    Raises:
        ProctorError: the run, a pack, a suppression or the baseline cannot be read.
    """
    from datetime import UTC, datetime

    from proctor.invariants.fit import load_packs
    from proctor.invariants.invariant import Severity
    from proctor.invariants.suppression import read_baseline, read_suppressions
    from proctor.invariants.trace import Run
    from proctor.verify.checker import check, exit_code
    from proctor.verify.coverage import coverage
    from proctor.verify.report import Report
    from proctor.verify.report.beside import read_beside

    hushed = [s for path in suppressions for s in read_suppressions(path)]
    known = read_baseline(baseline) if baseline is not None else frozenset()
    packs, names = load_packs(pack_paths) if pack_paths else ([], [])  # complain of these before a long read
    opened = Run(folder)
    if not pack_paths:
        packs, names = load_packs([], opened.trace)
    seen = coverage(opened.trace)
    progress = None if quiet or not sys.stderr.isatty() else _progress
    result = check(opened.trace, packs, progress=progress, suppressions=hushed, baseline=known)
    return Report(
        result=result,
        trace=opened.trace,
        info=opened.info,
        exit_code=exit_code(result, None if fail_on == "never" else Severity(fail_on), complete=seen.complete),
        packs=names,
        everything=everything,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
        beside=read_beside(folder),
    )


def _write_baseline(report: Report, path: Path) -> None:
    """What this check found, also what an earlier baseline knew; what is suppressed has its own place."""
    from proctor.invariants.suppression import write_baseline
    from proctor.verify.silence import known

    result, trace = report.result, report.trace
    if result is None or trace is None:
        return
    found = [*result.violations, *(s.violation for s in result.silenced if s.why == "known")]
    write_baseline((known(v, trace.programs) for v in found), path)


def _deliver(report: Report, args: argparse.Namespace) -> None:
    from proctor.verify import wording
    from proctor.verify.report import renderer, write_text
    from proctor.verify.report.formats import terminal

    if args.output is None and args.format == "terminal":
        terminal.show(report, terminal.console())
        return
    if args.output is None and args.format != "html":
        sys.stdout.write(renderer(args.format).render(report))
        return
    target = args.output or report.page
    if not target:
        raise UsageError("the run is not writable, so the page needs another place", hint="-o report.html")
    if args.output is not None:
        try:
            write_text(Path(args.output), renderer(args.format).render(report))
        except OSError as error:
            raise ProctorError(f"{args.output}: {error.strerror or error}") from None
    summary = wording.tally(report.result) if report.result is not None else "not checked"
    print(f"proctor: {summary}; report in {target}", file=sys.stderr)


def _progress(done: int, total: int, relation: str) -> None:
    print(f"\r\x1b[Kproctor: {relation} ({done + 1} of {total})", end="", file=sys.stderr, flush=True)
    if done + 1 == total:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
