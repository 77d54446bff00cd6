"""Is the candidate the same formula as the reference, for all data? One training step of unchanged commands.

Both commands are run once, and the operations of one step of every rank are recorded: forward, backward, reduction of gradients,
clipping, update. A wrong program is refuted by arithmetic in doubles and in a finite field, with the operation where it begins.
Exit code 0: EQUAL or PROVED; 1: DIFFERENT; 3: CLOSE or UNPROVED; 2: a command cannot be used.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from proctor.cli._launch import words
from proctor.errors import OracleError, UsageError


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--reference", metavar="CMD", required=True, help="the trusted run, on one device")
    parser.add_argument("--candidate", metavar="CMD", required=True, help="the run that is judged")
    parser.add_argument("--plan", metavar="PLAN", help="how parameters are cut (TOML); found by content without one")
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="end a command that takes longer (default 600)")
    parser.add_argument("--json", metavar="FILE", help="write the verdict as JSON, - for standard output")


def run(args: argparse.Namespace) -> int:
    """Do all of it."""
    import msgspec

    from proctor.oracle.plan_toml import plan_of
    from proctor.oracle.prove.command import tapes_of
    from proctor.oracle.prove.prover import decide
    from proctor.verify import wording

    if args.timeout <= 0:
        raise UsageError("--timeout must be more than 0")
    commands = [words(args.reference, "--reference"), words(args.candidate, "--candidate")]
    plan, seconds, sides = plan_of(args.plan), {}, []
    for name, command in zip(("reference", "candidate"), commands):
        began = time.monotonic()
        sides.append(tapes_of(command, timeout_s=args.timeout))
        seconds[name] = time.monotonic() - began
    if len(sides[0]) != 1:
        raise OracleError(f"the reference has {len(sides[0])} ranks", hint="it must run on one device")
    verdict = decide(sides[0][0], sides[1], plan)
    verdict.seconds = {**seconds, **verdict.seconds}
    if args.json:
        text = msgspec.json.format(msgspec.json.encode(verdict))
        if args.json == "-":
            print(text.decode())
            return verdict.exit_code
        Path(args.json).write_bytes(text)
    print(wording.clean(str(verdict)) if "\n" not in str(verdict) else "\n".join(wording.clean(line) for line in str(verdict).splitlines()))
    return verdict.exit_code
