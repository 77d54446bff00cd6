"""Runs the user's command with `watch` in its processes, and reads what they left. No torch here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from proctor.errors import OracleError, UsageError
from proctor.oracle.selfcheck.facts import CheckConfig, Facts, Timing
from proctor.oracle.selfcheck.outcomes import Outcome

POLL_S: Final = 0.05
NATURAL_S: Final = 0.3  # a command that is nearly through may end by itself
STOP_S: Final = 5.0
T = TypeVar("T")


@dataclass
class Launched:
    """One run of the command.

    Attributes:
        folder: with the ranks' folders and `output.log`.
        outcomes: of all ranks.
        timings, facts: likewise.
        exit_code: `None` if the command was stopped because all was done.
        seconds: it took.
        done: every process that trained was through with its checks.
        begun: a process trained.
    """

    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    exit_code: int | None = None
    seconds: float = 0.0
    done: bool = False
    begun: bool = False


def launch(command: Sequence[str], folder: Path, config: CheckConfig, *, timeout_s: float, to_the_end: bool = False, environment: Mapping[str, str] | None = None) -> Launched:
    """Run a command once, and stop it when all its ranks are done.

    Args:
        command: the user's.
        folder: is made anew.
        config: what the processes are told; its folder is set.
        timeout_s: after which it is ended.
        to_the_end: let it finish.
        environment: further variables.

    Raises:
        UsageError: it cannot be started.
        OracleError: the folder cannot be written, or the time was over before anything trained.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: command not found")
    boot = _boot(folder, msgspec.structs.replace(config, folder=str(folder.resolve())))
    variables = {**os.environ, **(environment or {}), "PROCTOR_SELF": str(folder.resolve())}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(boot), variables.get("PYTHONPATH")]))
    for name in ("PROCTOR_RUN", "PROCTOR_ORACLE"):
        variables.pop(name, None)
    began, log = time.monotonic(), folder / "output.log"
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(list(command), executable=program, env=variables, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as e:
            raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None
        try:
            code = _wait(process, folder, timeout_s, to_the_end)
        finally:
            _end(process)
    ranks = sorted(folder.glob("rank*"))
    found = Launched(folder, exit_code=code, seconds=time.monotonic() - began, begun=bool(ranks), done=bool(ranks) and all((r / "done").is_file() for r in ranks))
    _read(found, ranks)
    return found


def why_nothing(launched: Launched) -> str:
    """Why a run told nothing, in words."""
    from proctor.oracle.recording.record import cause

    code = launched.exit_code
    tail = cause(launched.folder / "output.log")
    if not launched.begun:
        return f"the command ended with code {code} without training a torch module{tail}" if code is not None else f"nothing was trained in time{tail}"
    if code == 0:
        return "the command trained a module and ended without an update by an optimizer of torch"
    return f"the command ended with code {code} before the checked update{tail}"


def _read(found: Launched, ranks: Sequence[Path]) -> None:
    for rank in ranks:
        found.outcomes += lines(rank / "outcomes.jsonl", Outcome)
        found.timings += lines(rank / "timing.jsonl", Timing)
        found.facts += lines(rank / "facts.jsonl", Facts)


def lines(path: Path, kind: type[T]) -> list[T]:
    """What a rank wrote, without a last line that was cut off."""
    out = []
    try:
        content = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in content:
        try:
            out.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError:
            continue
    return out


def _wait(process: subprocess.Popen[bytes], folder: Path, timeout_s: float, to_the_end: bool) -> int | None:
    began, complete = time.monotonic(), None
    while process.poll() is None:
        now = time.monotonic()
        if now - began > timeout_s:
            if any(folder.glob("rank*/outcomes.jsonl")):
                return None
            raise OracleError(f"nothing was checked within {timeout_s:.0f} s", hint="--timeout SECONDS, or a smaller model")
        if complete is None and not to_the_end and _complete(folder):
            complete = now
        if complete is not None and now - complete > NATURAL_S:
            return None
        time.sleep(POLL_S)
    return process.returncode


def _complete(folder: Path) -> bool:
    ranks = list(folder.glob("rank*"))
    return bool(ranks) and all((r / "done").is_file() for r in ranks)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and whatever it started: its session is its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _boot(folder: Path, config: Any) -> Path:
    import proctor.instrument

    source = Path(next(iter(proctor.instrument.__path__))) / "boot" / "sitecustomize.py"
    boot = folder / "boot"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        boot.mkdir(parents=True)
        shutil.copyfile(source, boot / "sitecustomize.py")
        (boot / "activation.json").write_bytes(msgspec.json.encode(config))
    except OSError as e:
        raise OracleError(f"{folder}: cannot be written: {e.strerror or e}", hint="choose another -o") from None
    return boot.resolve()
