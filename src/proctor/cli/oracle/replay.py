"""Do the step of a capsule again in the reference: confirm or clear what was found wrong with it.

The reference trains in one process. Its first step gets the job's parameters, optimizer state and data from the capsules
of all ranks; what the capsules say of gradients, parameters and loss is held against what it computes. The reference's
command runs six times up to its first steps.

Exit code 0: cleared, the step is what the reference computes. 1: confirmed, it is not. 2: bad input. 3: nothing can be
said (values are not held, shapes or data are not the reference's).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.cli._parts.launch import words
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.oracle.replaying.judge import Judgement

ROWS: Final = 10


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    parser.add_argument("--reference", metavar="CMD", required=True, help="the trusted run, on one device")
    parser.add_argument("--plan", metavar="PLAN", help="how the job is cut (TOML)")
    parser.add_argument("--samples", metavar="N", type=int, default=4, help="runs with noise (default 4)")
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="for one run of the reference (default 600)")
    parser.add_argument("--within", metavar="S", type=float, help="for all of them; nothing can be said when it is over")
    parser.add_argument("--keep", metavar="DIR", help="leave the reference's recordings in DIR")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Replay and show the answer."""
    from proctor.oracle.plans.plan_toml import plan_of
    from proctor.oracle.replaying.replay import replay
    from proctor.verify import wording

    if args.samples < 1 or not args.timeout > 0 or (args.within is not None and not args.within > 0):
        raise UsageError("--samples must be at least 1, --timeout and --within more than 0")
    command = words(args.reference, "--reference")

    def tell(text: str) -> None:
        print(f"proctor: {wording.clean(text)}", file=sys.stderr, flush=True)

    found = replay(
        Path(args.capsule), command, plan_of(args.plan), samples=args.samples, timeout_s=args.timeout, within_s=args.within, tell=tell,
        keep=Path(args.keep) if args.keep else None,
    )  # fmt: skip
    if args.format == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _show(found)
    return found.exit_code


def _show(found: Judgement) -> None:
    from proctor.verify import wording

    print(f"{found.verdict}: {wording.clean(found.reason)}")
    for f in found.wrong[:ROWS]:
        rank = f"rank {f.rank}" if f.rank >= 0 else "all ranks"
        print(f"    {f.kind:<10} {rank:<10} {wording.clean(f.name):<40} norm {f.job:.6g}, reference {f.reference:.6g}, tolerance {f.tolerance:.2g}")
    if len(found.wrong) > ROWS:
        print(f"    … and {len(found.wrong) - ROWS} more of {found.compared}")
    for note in found.notes:
        print(f"  note: {wording.clean(note)}")
