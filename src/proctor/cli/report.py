"""Sum up a recorded run, and write it as an HTML page.

Shows the command, processes, steps, records and what was lost; with -i, or after an earlier check of this run,
also what was violated.

exit code: 0 clean or not checked, 1 violations (level error or above, or as the earlier check counted them), 2 bad
usage or input, 3 inconclusive (nothing was recorded, nothing could be checked, or a rank is missing)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._inputs import add_packs, run_and_packs
from proctor.errors import ProctorError

if TYPE_CHECKING:
    from proctor.invariants.trace import Run
    from proctor.verify.report import Report


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="directory that `proctor record` wrote")
    add_packs(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the page; default: RUN/report.html")
    parser.add_argument("--all", action="store_true", dest="everything", help="show every violated rule")


def run(args: argparse.Namespace) -> int:
    """Print the summary, write the page, and return the exit code."""
    from dataclasses import replace

    from proctor.cli.check import examine
    from proctor.invariants.trace import Run
    from proctor.verify.report import html, terminal, write_text
    from proctor.verify.report.summary import summarise

    folder, packs = run_and_packs(args)
    if packs:
        report = examine(folder, packs, fail_on="error", everything=args.everything)
    else:
        report = replace(_earlier(Run(folder), folder), everything=args.everything)
    page = Path(args.output) if args.output else folder / "report.html"
    trouble = ""
    try:
        write_text(page, html.render(report))
    except OSError as error:
        trouble = f"{page}: {error.strerror or error}"
        if args.output:
            raise ProctorError(trouble) from None
    report = replace(report, page="" if trouble else str(page))
    console = terminal.console()
    if report.trace is not None:
        terminal.show_summary(summarise(report.trace, report.info), str(folder), console)
        console.print()
    terminal.show(report, console)
    if trouble:
        console.print(f"The page was not written: {trouble}", soft_wrap=True)
    return report.exit_code


def _earlier(opened: Run, folder: Path) -> Report:
    """The run with the result of its last check, if there was one."""
    from datetime import UTC, datetime

    from proctor.verify.coverage import coverage
    from proctor.verify.report import Report, jsonout
    from proctor.verify.wording import EXIT_CLEAN, EXIT_INCONCLUSIVE

    seen = coverage(opened.trace)
    saved = jsonout.read(folder / "check.json")
    nothing = opened.trace.calls.is_empty() and opened.trace.states.is_empty()
    result, code, packs = saved or (None, EXIT_INCONCLUSIVE if nothing or not seen.complete else EXIT_CLEAN, [])
    return Report(
        result=result,
        trace=opened.trace,
        info=opened.info,
        exit_code=code,
        packs=packs,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
    )
