"""Sum up a recorded run, and write it as an HTML page.

Shows the command, processes, steps, records and what was lost; with -i, or after an earlier check of this run,
also what was violated.

exit code: 0 clean or not checked, 1 violations (level error or above, or as the earlier check counted them), 2 bad
usage or input, 3 inconclusive (nothing was recorded, nothing could be checked, or a rank is missing)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from proctor.cli._parts.inputs import add_packs, run_and_packs
from proctor.errors import ProctorError


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
    from proctor.verify.report import write_text
    from proctor.verify.report.formats import html, terminal
    from proctor.verify.report.load import load
    from proctor.verify.report.summary import summarise

    folder, packs = run_and_packs(args)
    if packs:
        report = examine(folder, packs, fail_on="error", everything=args.everything)
    else:
        report = replace(load(folder), everything=args.everything)
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
