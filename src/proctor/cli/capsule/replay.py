"""Do the step of a capsule again and compare. Exit code 0 reproduced, 1 differs, 3 nothing can be said."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.cli.capsule._text import clean
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.instrument.replay.again import Judgement

EXIT_CODES: Final = {"reproduced": 0, "differs": 1, "cannot": 3}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    options_of(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD…", help="run this, not the recorded command")


def options_of(parser: argparse.ArgumentParser) -> None:
    """Those of a re-execution."""
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="for one execution (default 600)")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal", dest="form")


def run(args: argparse.Namespace) -> int:
    """Do the step again; exit code 0, 1 or 3."""
    from proctor.instrument.replay.again import judge

    command = command_of(args, "replay")
    found = judge(Path(args.capsule), command, timeout_s=args.timeout, tell=tell)
    if args.form == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _say(found)
    return EXIT_CODES[found.verdict]


def command_of(args: argparse.Namespace, action: str) -> list[str]:
    """What to run; argparse gives options after the capsule's name to the command, and drops a `--` before it only if none are there.

    Raises:
        UsageError: an option is wrong.
    """
    command: list[str] = args.command
    if command[:1] and command[0].startswith("-"):
        at = command.index("--") if "--" in command else len(command)
        options, command = command[:at], command[at + 1 :]
        late = argparse.ArgumentParser(prog=f"proctor capsule {action} CAPSULE")
        options_of(late)
        try:
            late.parse_args(options, args)
        except SystemExit:
            raise UsageError("what to run goes after --", hint=f"proctor capsule {action} CAPSULE -- CMD…") from None
    if not args.timeout > 0:
        raise UsageError("--timeout must be positive")
    return command


def tell(text: str) -> None:
    """A line on what is done."""
    print(f"proctor: {clean(text)}", file=sys.stderr, flush=True)


def _say(found: Judgement) -> None:
    print(f"{found.verdict}: {clean(found.reason)}")
    for d in found.differences:
        print(f"    {d.stage:<12} rank {d.rank}  {clean(d.name):<40} {clean(d.left)[:60]} ≠ {clean(d.right)[:60]}")
