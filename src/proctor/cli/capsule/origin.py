"""Do the step of a capsule again and say where its first NaN or infinity comes from. Exit code 0 all finite, 1 found, 3 nothing can be said."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli.capsule._text import clean
from proctor.cli.capsule.replay import command_of, options_of, tell

if TYPE_CHECKING:
    from proctor.instrument.replay.plan import Link, Origin


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    options_of(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD…", help="run this, not the recorded command")


def run(args: argparse.Namespace) -> int:
    """Do the step again; exit code 0, 1 or 3."""
    from proctor.instrument.replay.again import first_bad

    command = command_of(args, "origin")
    found = first_bad(Path(args.capsule), command, timeout_s=args.timeout, tell=tell)
    if args.form == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found if isinstance(found, dict) else {"cannot": found}), indent=1).decode())
    elif isinstance(found, str):
        print(f"cannot: {clean(found)}")
    else:
        say(found)
    return 3 if isinstance(found, str) else int(any(origin.end for origin in found.values()))


def say(found: dict[int, Origin]) -> None:
    """The origin of each rank; ranks that only got theirs from others come last."""
    bad = {rank: origin for rank, origin in sorted(found.items()) if origin.end}
    if not bad:
        print("all finite: losses, gradients and parameters of this step, on all ranks")
        return
    for rank, origin in sorted(bad.items(), key=lambda pair: received(pair[1])):
        came = " (it came by a collective: see the other ranks)" if received(origin) else ""
        print(f"rank {rank}: {clean(origin.end)} is not finite{came}")
        if origin.outside:
            print(f"    not finite before the step: {clean(origin.outside)}")
        for i, link in enumerate(origin.chain):
            print(f"    {'first' if not i else 'then':<6}{clean(words(link))}")
            for given in link.inputs if not i else ():
                print(f"          given {clean(given)}")


def received(origin: Origin) -> bool:
    """Whether a rank got its first value that is not finite from another one."""
    return bool(origin.chain) and origin.chain[0].operation.startswith(("c10d", "_c10d"))


def words(link: Link) -> str:
    """One operation in a line."""
    where = " in ".join(filter(None, [f"{'backward of ' if link.backward else ''}{link.line}" if link.line else "", link.module]))
    return f"{link.operation} gave {link.gave}" + (f", {where}" if where else "")
