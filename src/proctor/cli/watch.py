"""Run a command, judge its training steps while it runs, and tell people what is wrong.

    proctor watch -i pack.json --page page.toml -- torchrun --nproc-per-node 8 train.py

The command is run as it is: pid, signals, terminal and exit code are its own. A verifier process beside it judges each
step and outlives it by some seconds. With --fail-on this command waits for the verdict, and an exit code 0 becomes 1 when
something of that severity was found.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proctor.cli._inputs import add_packs
from proctor.cli._launch import add_command, become, command_of, environment_of, needs_of
from proctor.cli._watched import LEVELS, Settings, begin, settings_of
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.instrument.config import RecordConfig

CAPSULES: Final = 3  # steps kept in memory
_VERDICT_S: Final = 120.0  # waited for after the command has ended
_FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def prepare(parser: argparse.ArgumentParser) -> None:
    add_packs(parser)
    parser.add_argument("-o", "--output", metavar="RUN", help="run directory to create (default proctor-runs/<time>-<pid>)")
    parser.add_argument("--page", metavar="FILE", help="who is told (docs/paging.md)")
    parser.add_argument("--job", metavar="NAME", help="what pages call it (default: of --page, else the run directory)")
    parser.add_argument("--fail-on", choices=LEVELS, help="wait for the verdict, and turn exit code 0 into 1")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics there (default host 127.0.0.1)")
    parser.add_argument("--export", metavar="WHERE", action="append", default=[], help="also write to tensorboard:DIR, …")
    parser.add_argument("--suppressions", metavar="FILE", action="append", default=[], help="violations that are expected")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also take records of other hosts there")
    parser.add_argument("--verifier", metavar="HOST:PORT", help="send records to a verifier on another host")
    parser.add_argument("--token-file", metavar="FILE", help="of the job, for --listen and --verifier")
    parser.add_argument("--full", action="store_true", help="record everything, not only what the packs need")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="watch every N-th step (default 1)")
    parser.add_argument("--warmup", metavar="K", type=int, default=10, help="first K steps are always watched (default 10)")
    parser.add_argument("--no-capsules", action="store_true", help="keep no steps for a replay")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in RUN")
    add_command(parser)


def run(args: argparse.Namespace) -> int:
    """Start the verifier, then become the command, or wait for it."""
    from proctor.instrument.rundir import create_run, write_boot

    program, command = command_of(args, "proctor watch -i PACK -- python train.py")
    if args.every < 1 or args.warmup < 0:
        raise UsageError("--every must be at least 1 and --warmup at least 0")
    if (args.listen or args.verifier) and not args.token_file:
        raise UsageError("other hosts need the job's token", hint="--token-file FILE, a file of your own with mode 600")
    target = Path(args.output or f"proctor-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").resolve()
    settings = settings_of(args, target)
    config = _config(args, target, settings)
    create_run(target, command, overwrite=args.overwrite, sampling={"every": args.every, "warmup": args.warmup})
    boot = write_boot(target, config)
    if not args.token_file:
        from proctor.invariants.peer import make_token

        make_token(Path(settings.token_file))
    environment = environment_of(boot, config.run)
    if args.fail_on is not None:
        return _supervise(program, command, environment, settings, remote=bool(args.verifier))
    if not args.verifier:
        begin(settings, os.getpid(), aloud=sys.stderr.isatty())
    return become(program, command, environment)


def _config(args: argparse.Namespace, target: Path, settings: Settings) -> RecordConfig:
    from proctor.instrument.config import RecordConfig

    chosen: dict[str, Any] = {} if args.full else needs_of([Path(p) for p in settings.packs])
    return RecordConfig(
        run=str(target),
        every=args.every,
        warmup=args.warmup,
        stream=f"tcp:{args.verifier}" if args.verifier else settings.address,
        token_file=settings.token_file,
        capsules=0 if args.no_capsules else CAPSULES,
        **chosen,
    )


def _supervise(program: str, command: list[str], environment: dict[str, str], settings: Settings, *, remote: bool) -> int:
    """Run the command as a child, then wait for what the verifier says."""
    from proctor.invariants.invariant import Severity

    try:
        child = subprocess.Popen(command, executable=program, env=environment)
    except OSError as e:
        raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None
    verifier = None if remote else begin(settings, child.pid, aloud=True)
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: child.send_signal(n))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command, too
    code = child.wait()
    code = 128 - code if code < 0 else code
    if verifier is None or settings.fail_on == "never":
        return code
    try:
        verifier.wait(_VERDICT_S)
    except subprocess.TimeoutExpired:
        print(f"proctor: no verdict after {_VERDICT_S:.0f} s  →  proctor check {settings.run}", file=sys.stderr)
        return code
    worst = settings.verdict()
    failed = worst is not None and Severity(worst).level >= Severity(settings.fail_on).level
    return 1 if code == 0 and failed else code
