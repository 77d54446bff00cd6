"""Run a command unchanged and record what its training processes do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.cli._parts.launch import add_command, become, command_of, environment_of, job_first
from proctor.cli._parts.needs import needs_of
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.instrument.config import RecordConfig


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="RUN", required=True, help="run directory to create")
    parser.add_argument("--select", metavar="PACK", action="append", default=[], help="record only what these packs need")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="record every N-th step (default 1)")
    parser.add_argument("--warmup", metavar="K", type=int, default=10, help="first K steps are always recorded (default 10)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in RUN")
    parser.add_argument("--no-user-code", action="store_true", help="do not observe functions of your own modules")
    add_command(parser)


def run(args: argparse.Namespace) -> int:
    """Set up the run directory, then become the command: pid, signals, terminal and exit code are its own."""
    program, command = command_of(args, "proctor record -o RUN -- python train.py")
    if args.every < 1 or args.warmup < 0:
        raise UsageError("--every must be at least 1 and --warmup at least 0")
    with job_first(program, command):
        from proctor.instrument.record.rundir import create_run, write_boot

        config = _config(args)
        target = Path(args.output)
        create_run(target, command, overwrite=args.overwrite, sampling={"every": args.every, "warmup": args.warmup})
        environment = environment_of(write_boot(target, config), config.run)
    return become(program, command, environment)


def _config(args: argparse.Namespace) -> RecordConfig:
    from proctor.instrument.config import RecordConfig

    run = str(Path(args.output).resolve())
    chosen: dict[str, Any] = needs_of([Path(p) for p in args.select]) if args.select else {}
    return RecordConfig(run=run, command=os.getpid(), every=args.every, warmup=args.warmup, user_code=not args.no_user_code, **chosen)
