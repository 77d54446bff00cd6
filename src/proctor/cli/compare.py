"""What differs between two recorded runs, and first of all before the first number does.

    proctor compare runs/yesterday runs/today
    proctor compare runs/a runs/b --html compared.html

Arguments, environment, package versions, ranks, the program's functions, parameters at start and the order of the data; then the first
step in which a value differs, and which one. Values are compared bit for bit. Secrets are left out.

exit code: 0 nothing differs, 1 something does, 2 bad input, 3 no value could be compared
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from proctor.errors import ProctorError, UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("first", metavar="RUN", help="directory that `proctor record` or `watch` wrote")
    parser.add_argument("second", metavar="RUN")
    parser.add_argument("--format", choices=("terminal", "json", "html"), default="terminal")
    parser.add_argument("--html", metavar="FILE", help="write the page for a browser as well")


def run(args: argparse.Namespace) -> int:
    """Compare, show, and return the exit code."""
    from proctor.invariants.trace import open_run
    from proctor.verify import wording
    from proctor.verify.compare import compare_runs, renderer
    from proctor.verify.report import write_text

    if Path(args.first).resolve() == Path(args.second).resolve():
        raise UsageError("both are the same run", hint="proctor compare RUN OTHER")
    found = compare_runs(open_run(args.first), open_run(args.second))
    if args.html:
        try:
            write_text(Path(args.html), renderer("html").render(found))
        except OSError as error:
            raise ProctorError(f"{args.html}: {error.strerror or error}") from None
    sys.stdout.write(renderer(args.format).render(found))
    if found.differs:
        return wording.EXIT_VIOLATED
    return wording.EXIT_CLEAN if found.values else wording.EXIT_INCONCLUSIVE
