"""Check a recorded run against packs of rules, and report what was violated.

Always writes RUN/report.html, RUN/violations.jsonl and RUN/check.json beside the run when it is writable.

exit code: 0 clean, 1 violations at or above --fail-on, 2 bad usage or input, 3 inconclusive (nothing could be
checked, or a rank is missing), 101 internal error
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._inputs import add_packs, load_packs, run_and_packs
from proctor.errors import ProctorError, UsageError

if TYPE_CHECKING:
    from proctor.verify.report import Report

LEVELS = ("info", "warning", "error", "critical", "never")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from proctor.verify.report import FORMATS

    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="directory that `proctor record` wrote")
    add_packs(parser)
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: terminal")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report there instead of to the terminal")
    parser.add_argument("--fail-on", choices=LEVELS, default="error", help="least severity that makes the exit code 1")
    parser.add_argument("--all", action="store_true", dest="everything", help="show every violated rule")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Check, write the reports, and return the exit code."""
    folder, pack_paths = run_and_packs(args)
    report = examine(folder, pack_paths, fail_on=args.fail_on, everything=args.everything, quiet=args.quiet)
    report, trouble = keep(report, folder)
    _deliver(report, args)
    if trouble:
        print(f"proctor: {trouble}", file=sys.stderr)
    return report.exit_code


def examine(folder: Path, pack_paths: list[Path], *, fail_on: str, everything: bool = False, quiet: bool = True) -> Report:
    """Load a run and its packs, and check.

    Raises:
        ProctorError: the run or a pack cannot be read.
    """
    from datetime import UTC, datetime

    from proctor.invariants.invariant import Severity
    from proctor.invariants.trace import Run
    from proctor.verify.checker import check, exit_code
    from proctor.verify.coverage import coverage
    from proctor.verify.report import Report

    packs, names = load_packs(pack_paths)
    opened = Run(folder)
    seen = coverage(opened.trace)
    result = check(opened.trace, packs, progress=None if quiet or not sys.stderr.isatty() else _progress)
    return Report(
        result=result,
        trace=opened.trace,
        info=opened.info,
        exit_code=exit_code(result, None if fail_on == "never" else Severity(fail_on), complete=seen.complete),
        packs=names,
        everything=everything,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
    )


def keep(report: Report, folder: Path) -> tuple[Report, str]:
    """Write the reports beside the run; where that is impossible, say why."""
    from dataclasses import replace

    from proctor.verify.report import html, jsonout, write_text

    violations = report.result.violations if report.result is not None else []
    files: dict[str, Callable[[], str]] = {
        "violations.jsonl": lambda: jsonout.lines(violations),
        "check.json": lambda: jsonout.render(report),
        "report.html": lambda: html.render(report),
    }
    for name, text in files.items():
        try:
            write_text(folder / name, text())
        except OSError as error:
            return report, f"{folder / name} was not written: {error.strerror or error}"
    return replace(report, page=str(folder / "report.html")), ""


def _deliver(report: Report, args: argparse.Namespace) -> None:
    from proctor.verify import wording
    from proctor.verify.report import renderer, terminal, write_text

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
