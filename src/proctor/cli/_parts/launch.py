"""Becoming the user's command, with the recorder in its environment: what `record` and `watch` have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from proctor.errors import ProctorError, UsageError


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare `-- CMD…`."""
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD…", help="the command, after --")


def command_of(args: argparse.Namespace, hint: str) -> tuple[str, list[str]]:
    """The file to execute, and the command line.

    Raises:
        UsageError: there is none, or it cannot be found.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else []
    if not command:
        raise UsageError("no command", hint=hint)
    return _program(command[0]), command


def _program(name: str) -> str:
    """The file that a command's first word names: as a shell finds it, or a path that this process may execute with the rights that it has now.

    `shutil.which` asks for the rights of the real user: capabilities and a set user do not count for it.
    """
    program = shutil.which(name)
    if program is not None:
        return program
    if os.sep in name and Path(name).is_file():
        if os.access(name, os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return name
        raise UsageError(f"{name}: may not be executed", hint="chmod +x, or put its interpreter ahead of it")
    raise UsageError(f"{name}: command not found")


def words(text: str, option: str) -> list[str]:
    """A command line that was given as one argument.

    Raises:
        UsageError: it is empty, or its quotes do not close.
    """
    try:
        found = shlex.split(text)
    except ValueError as e:
        raise UsageError(f"{option}: {e}") from None
    if not found:
        raise UsageError(f"{option}: no command")
    return found


def environment_of(boot: Path, run: str) -> dict[str, str]:
    """The present environment with the start-up hook first on PYTHONPATH."""
    from proctor.instrument.record.rundir import with_hook

    return {**with_hook(os.environ, boot), "PROCTOR_RUN": run}


def become(program: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process: pid, signals, terminal and exit code are the command's own."""
    hand_on_signals()
    try:
        os.execvpe(program, list(command), environment)
    except OSError as e:
        raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None


@contextlib.contextmanager
def job_first(program: str, command: Sequence[str]) -> Iterator[None]:
    """What breaks within, while Proctor prepares, keeps no command from running: it is said, and this process becomes the command, unwatched.

    What the user can mend (`ProctorError`) and interruptions pass.
    """
    try:
        yield
    except (ProctorError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of native code is no `Exception`
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"proctor: internal error: {why}; the command runs unwatched", file=sys.stderr, flush=True)
        become(program, command, dict(os.environ))


def hand_on_signals() -> None:
    """What is ignored when the command starts is what was ignored when we did (`nohup`, a job in the background).

    A library of ours takes SIGINT though it was ignored, which Python does not know. Python itself ignores two signals, which a
    command that it becomes would inherit: a pipeline would go on writing after its reader has gone.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_IGN)
