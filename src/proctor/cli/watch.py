"""Run a command, judge its training steps while it runs, and tell people what is wrong.

    proctor watch -i pack.json --page page.toml -- torchrun --nproc-per-node 8 train.py

The command is run as it is: pid, signals, terminal and exit code are its own. A verifier process beside it judges each
step and outlives it by some seconds. With --fail-on this command waits for the verdict, and an exit code 0 becomes 1 when
something of that severity was found; --fail-on never only waits. As the first process of a container it waits, too, since
the verifier would end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proctor.cli._parts.budget import DEFAULT, share_of
from proctor.cli._parts.inputs import add_packs
from proctor.cli._parts.launch import (
    add_command,
    become,
    command_of,
    environment_of,
    hand_on_signals,
    job_first,
)
from proctor.cli._parts.needs import needs_of
from proctor.cli._parts.project import leave_out, set_defaults
from proctor.cli._parts.watching import LEVELS, add_verifier, settings_of
from proctor.errors import TraceError, UsageError

if TYPE_CHECKING:
    from proctor.instrument.config import RecordConfig
    from proctor.verify.service.settings import Settings

CAPSULES: Final = 3  # steps kept in memory
_VERDICT_S: Final = 120.0  # waited for after the command has ended
_VERIFIER_S: Final = ("listen", "page", "metrics", "export", "suppressions", "fail_on")  # options that are for the verifier
_FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def prepare(parser: argparse.ArgumentParser) -> None:
    add_packs(parser)
    parser.add_argument("-o", "--output", metavar="RUN", help="run directory to create (default proctor-runs/<time>-<pid>)")
    add_verifier(parser)
    parser.add_argument("--fail-on", choices=LEVELS, help="wait for the verdict, and turn exit code 0 into 1 (never: only wait)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also take records of other hosts there")
    parser.add_argument("--verifier", metavar="HOST:PORT", help="send records to a verifier on another host, or to a relay at unix:PATH")
    parser.add_argument("--token-file", metavar="FILE", help="of the job, for --listen and --verifier")
    parser.add_argument("--full", action="store_true", help="record everything, not only what the packs need")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="watch every N-th step (default 1)")
    parser.add_argument("--warmup", metavar="K", type=int, help="first K steps are always watched (default 10; with a budget 200, and five minutes)")
    parser.add_argument("--budget", metavar="SHARE", help="of the time of training that it may cost (default 1%%, none with --every or --full), or none; see docs/watch.md")
    parser.add_argument("--no-capsules", action="store_true", help="keep no steps for a replay")
    parser.add_argument("--capsules", action="store_false", dest="no_capsules", help="keep some (the default)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in RUN")
    add_command(parser)
    set_defaults(parser, "watch")


def run(args: argparse.Namespace) -> int:
    """Start the verifier, then become the command, or wait for it."""
    program, command = command_of(args, "proctor watch -i PACK -- python train.py")
    with job_first(program, command):
        settings, environment = _prepared(args, command)
    if args.verifier:
        return become(program, command, environment)
    if args.fail_on is not None or os.getpid() == 1:
        return _supervise(program, command, environment, settings)
    with job_first(program, command):
        _begin(settings, os.getpid(), aloud=sys.stderr.isatty(), apart=True)
    return become(program, command, environment)


def _prepared(args: argparse.Namespace, command: list[str]) -> tuple[Settings, dict[str, str]]:
    """Make the run directory; what the verifier is told, and the environment of the command."""
    from proctor.instrument.record.rundir import write_boot

    budget = share_of_command(args)
    warmup_s = _warm_up(args, budget)
    if args.every < 1 or args.warmup < 0:
        raise UsageError("--every must be at least 1 and --warmup at least 0")
    _fits_together(args)
    target = Path(args.output or f"proctor-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").resolve()
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{target}: the name is not UTF-8", hint="choose another -o") from None
    settings = settings_of(args, target)
    config = _config(args, target, settings, budget, warmup_s)
    _make_run(args, target, command)
    boot = write_boot(target, config)
    settings.write()
    if not args.token_file:
        from proctor.invariants.wire.peer import make_token

        make_token(Path(settings.token_file))
    return settings, environment_of(boot, config.run)


def _begin(settings: Settings, pid: int, *, aloud: bool, apart: bool) -> subprocess.Popen[bytes] | None:
    """Start the verifier, see `begin`; where that cannot be, the command is recorded all the same."""
    try:
        from proctor.verify.service.processes import begin

        return begin(settings, pid, aloud=aloud, apart=apart)
    except (TraceError, OSError) as e:
        print(f"proctor: {e}; the command runs unwatched, and is recorded  →  proctor check {settings.run}", file=sys.stderr)
        return None


def share_of_command(args: argparse.Namespace) -> float:
    """The budget: that which was asked for, and the default where nobody says what is looked at."""
    chosen = args.budget is not None or args.every > 1 or args.full
    return share_of(args.budget if chosen else DEFAULT)


def _warm_up(args: argparse.Namespace, budget: float) -> float:
    """Fills in the number of first steps that are all watched; the seconds for which that lasts at least."""
    from proctor.instrument.budget import FREE, FREE_S

    if args.warmup is not None:
        return 0.0
    args.warmup = FREE if budget else 10
    return FREE_S if budget else 0.0


def _fits_together(args: argparse.Namespace) -> None:
    """Raises `UsageError`: options that contradict each other, or the place where this command stands."""
    from proctor.invariants.wire.peer import parse_address

    if (args.listen or args.verifier) and not args.token_file:
        raise UsageError("other hosts need the job's token", hint="--token-file FILE, a file of your own with mode 600")
    if args.verifier:
        parse_address(_address(args.verifier))
        leave_out(args, _VERIFIER_S)
        for option in _VERIFIER_S:
            if getattr(args, option):
                name = option.replace("_", "-")
                raise UsageError(f"--{name} is for the verifier, which is elsewhere", hint=f"proctor verify RUN --listen … --{name} …")
    ranks = os.environ.get("WORLD_SIZE", "")
    if "LOCAL_RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1 and not args.verifier:
        raise UsageError(f"this is one of {ranks} ranks, and one verifier judges them all", hint="proctor watch -- torchrun …, not the other way")


def _make_run(args: argparse.Namespace, target: Path, command: list[str]) -> None:
    from proctor.instrument.record.rundir import create_run
    from proctor.verify.service.processes import watched_now

    if args.overwrite and watched_now(target):
        raise UsageError(f"{target} is being watched", hint="wait until its verifier is done, or choose another -o")
    create_run(target, command, overwrite=args.overwrite, sampling={"every": args.every, "warmup": args.warmup})
    shutil.rmtree(target / "verify", ignore_errors=True)  # of an earlier run


def _address(text: str) -> str:
    return text if text.startswith(("tcp:", "unix:")) else f"tcp:{text}"


def _config(args: argparse.Namespace, target: Path, settings: Settings, budget: float, warmup_s: float) -> RecordConfig:
    from proctor.instrument.config import RecordConfig

    chosen: dict[str, Any] = {} if args.full else needs_of([Path(p) for p in settings.packs])
    return RecordConfig(
        run=str(target),
        every=args.every,
        warmup=args.warmup,
        warmup_s=warmup_s,
        stream=_address(args.verifier) if args.verifier else settings.address,
        token_file=settings.token_file,
        budget=budget,
        capsules=0 if args.no_capsules else CAPSULES,
        **chosen,
    )


class _EnoughError(Exception):
    """Somebody ended us while we waited for the verdict."""


def _supervise(program: str, command: list[str], environment: dict[str, str], settings: Settings) -> int:
    """Run the command as a child, then wait for what the verifier says."""
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        if child is None or child.returncode is not None:
            raise _EnoughError
        if number != signal.SIGINT:  # which the terminal sends to the command, too
            child.send_signal(number)

    for number in (*_FORWARDED, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` stays what it is
            signal.signal(number, forward)
    hand_on_signals()
    try:
        child = subprocess.Popen(command, executable=program, env=environment)
    except OSError as e:
        raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None
    verifier = _begin(settings, child.pid, aloud=True, apart=False)
    code = child.wait()
    code = 128 - code if code < 0 else code
    trouble = "no verdict"
    try:
        if verifier is not None:
            verifier.wait(_VERDICT_S)
    except subprocess.TimeoutExpired:
        trouble += f" after {_VERDICT_S:.0f} s"
    except _EnoughError:
        trouble += " yet"
    verdict = settings.verdict()
    if verdict is None:
        print(f"proctor: {trouble}  →  proctor check {settings.run}", file=sys.stderr)
        return code
    if verdict.delivering and os.getpid() == 1:  # the container ends with this process
        with contextlib.suppress(OSError, _EnoughError):
            os.waitpid(verdict.delivering, 0)
    failed = settings.fail_on != "never" and verdict.fails(settings.fail_on)
    return 1 if code == 0 and failed else code
