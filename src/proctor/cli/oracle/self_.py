"""Check a program against itself: no reference is needed. Exit code 0, 1, 2 or 3.

The program must compute the same under changes that must not matter: another batch beside a sample, another order, half a batch a rank, a
checkpointed block, a resume, a second run. Which of them apply is found out; what was not checked is listed with the reason.
The command runs as it is, until its third update; relations are checked in copies of that step, so that the job is never touched.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from proctor.cli._parts.launch import add_command, command_of, words
from proctor.errors import OracleError, UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-o", "--output", metavar="DIR", help="keep logs and recordings there (default: a temporary folder)")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="check this relation only; may be repeated")
    parser.add_argument("--skip", metavar="NAME", action="append", default=[], help="leave this relation out; may be repeated")
    parser.add_argument("--vary", metavar="ARGS", nargs=2, action="append", default=[], help="two sets of arguments that must compute the same; may be repeated")
    parser.add_argument("--step", metavar="N", type=int, default=2, help="update at which relations are checked, counted from 0 (default 2)")
    parser.add_argument("--budget", metavar="S", type=float, default=900.0, help="for all relations at a step (default 900)")
    parser.add_argument("--timeout", metavar="S", type=float, default=3600.0, help="end a run of the command that takes longer (default 3600)")
    parser.add_argument("--to-the-end", action="store_true", help="let the command finish instead of stopping it")
    parser.add_argument("--format", choices=("terminal", "json", "html"), default="terminal")
    parser.add_argument("--html", metavar="FILE", help="write the report for a browser as well")
    add_command(parser)


def run(args: argparse.Namespace) -> int:
    """Check, and show what was found."""
    from proctor.oracle.selfcheck import report as shown
    from proctor.oracle.selfcheck.run import Asked, check

    _, command = command_of(args, "proctor oracle self -- python train.py")
    if args.step < 0 or args.budget <= 0 or args.timeout <= 0:
        raise UsageError("--step must be at least 0, --budget and --timeout more than 0")
    for pair in args.vary:
        for text in pair:
            if text.strip():
                words(text, "--vary")
    with tempfile.TemporaryDirectory(prefix="proctor-self-") as folder:
        home = Path(args.output) if args.output else Path(folder)
        if home.exists() and not home.is_dir():
            raise UsageError(f"{home} is a file, not a directory")
        if args.output and home.is_dir() and any(home.iterdir()) and not (home / "step" / "boot").is_dir():
            raise UsageError(f"{home} is not empty and not of an earlier check", hint="choose another -o")
        found = check(
            Asked(
                command, home, args.step, tuple(args.only), tuple(args.skip), tuple((a, b) for a, b in args.vary),
                timeout_s=args.timeout, budget_s=args.budget, to_the_end=args.to_the_end,
            )
        )  # fmt: skip
        try:
            (home / "self.json").write_text(shown.as_json(found), encoding="utf-8")
            if args.html:
                Path(args.html).write_text(shown.as_html(found), encoding="utf-8")
        except OSError as e:
            raise OracleError(f"{e.filename}: cannot be written: {e.strerror or e}") from None
    render = {"terminal": shown.as_text, "json": shown.as_json, "html": shown.as_html}[args.format]
    print(render(found), end="")
    return found.exit_code
