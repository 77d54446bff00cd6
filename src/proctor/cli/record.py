"""Run a command unchanged and record what its training processes do."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.instrument.config import RecordConfig


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="RUN", required=True, help="run directory to create")
    parser.add_argument("--select", metavar="PACK", action="append", default=[], help="record only what these packs need")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="record every N-th step (default 1)")
    parser.add_argument("--warmup", metavar="K", type=int, default=10, help="first K steps are always recorded (default 10)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in RUN")
    parser.add_argument("--no-user-code", action="store_true", help="do not observe functions of your own modules")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD…", help="the command, after --")


def run(args: argparse.Namespace) -> int:
    """Set up the run directory, then become the command: pid, signals, terminal and exit code are its own."""
    from proctor.errors import UsageError
    from proctor.instrument.rundir import create_run, write_boot

    command = args.command[1:] if args.command[:1] == ["--"] else []
    if not command:
        raise UsageError("no command", hint="proctor record -o RUN -- python train.py")
    if args.every < 1 or args.warmup < 0:
        raise UsageError("--every must be at least 1 and --warmup at least 0")
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: command not found")
    config = _config(args)
    target = Path(args.output)
    create_run(target, command, overwrite=args.overwrite, sampling={"every": args.every, "warmup": args.warmup})
    boot = write_boot(target, config)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(boot.resolve()), environment.get("PYTHONPATH")]))
    environment["PROCTOR_RUN"] = config.run
    try:
        os.execvpe(program, command, environment)
    except OSError as e:
        raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None


def _config(args: argparse.Namespace) -> RecordConfig:
    from proctor.instrument.config import RecordConfig

    run = str(Path(args.output).resolve())
    user_code = not args.no_user_code
    if not args.select:
        return RecordConfig(run=run, every=args.every, warmup=args.warmup, user_code=user_code)
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import Needs, registry

    relations = registry()
    needs = Needs()
    for path in args.select:
        for rule in read_pack(Path(path), list(relations)).invariants:
            needs |= relations[rule.relation].needs(rule.hypothesis)
    return RecordConfig(
        run=run,
        functions=needs.functions,
        states=needs.states,
        values=needs.values,
        every=args.every,
        warmup=args.warmup,
        user_code=user_code,
    )
