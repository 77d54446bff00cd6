"""Runs the user's command with `watch` in its processes, and reads what they left. No torch here."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from proctor.errors import OracleError
from proctor.oracle.recording.running import LOG, cause, find_program, run_hooked
from proctor.oracle.selfcheck.facts import FAILED, WAITS, CheckConfig, Facts, Timing
from proctor.oracle.selfcheck.outcomes import Outcome

T = TypeVar("T")
LEAST_S: Final = 10.0
MOST_S: Final = 60.0
_NUMBER: Final = re.compile(r"--nproc([-_]per[-_]node)?|--num[-_]processes")  # of ranks, as launchers call it


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
    find_program(command)
    shutil.rmtree(folder, ignore_errors=True)
    began, there = time.monotonic(), str(folder.resolve())
    patience = Patience(folder)

    def look(_: int, passed_s: float) -> None:
        if passed_s > timeout_s and not any(folder.glob("rank*/outcomes.jsonl")):
            raise OracleError(f"nothing was checked within {timeout_s:.0f} s", hint="--timeout SECONDS, or a smaller model")

    code = run_hooked(
        command,
        folder,
        msgspec.json.encode(msgspec.structs.replace(config, folder=there)),
        mark="PROCTOR_SELF",
        value=there,
        variables=environment or {},
        complete=lambda: time.monotonic() - began > timeout_s or (not to_the_end and _complete(folder) and patience.over(time.monotonic() - began)),
        look=look,
    )
    ranks = sorted(folder.glob("rank*"))
    found = Launched(folder, exit_code=code, seconds=time.monotonic() - began, begun=bool(ranks), done=bool(ranks) and all((r / "done").is_file() for r in ranks))
    _read(found, ranks)
    return found


def on_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """A command on several ranks of this machine, by torch's launcher; empty where it is none of python's."""
    if not Path(command[0]).name.startswith("python"):
        return []
    return [command[0], "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command[1:]]


def alone(command: Sequence[str]) -> list[str]:
    """A launcher's command with one rank; empty where no option of it says how many there are."""
    out, count = list(command), 0
    for at, word in enumerate(command):
        name, given, value = word.partition("=")
        if not _NUMBER.fullmatch(name):
            continue
        if given and value.isdecimal():
            out[at], count = f"{name}=1", count + 1
        elif not given and at + 1 < len(command) and command[at + 1].isdecimal():
            out[at + 1], count = "1", count + 1
    return out if count == 1 else []


def unwatched(launched: Launched) -> str:
    """Why a process could not be watched to the end, "" where all were."""
    return next((f"{path.parent.name} could not be watched any longer: {path.read_text(encoding='utf-8', errors='replace')}" for path in sorted(launched.folder.glob(f"rank*/{FAILED}"))), "")


def why_nothing(launched: Launched) -> str:
    """Why a run told nothing, in words."""
    failed, code = unwatched(launched), launched.exit_code
    if failed:
        return failed
    tail = cause(launched.folder / LOG)
    if not launched.begun:
        return f"the command ended with code {code} without training a torch module{tail}" if code is not None else f"nothing was trained in time{tail}"
    if code == 0:
        return "the command trained a module and ended without an update by an optimizer of torch"
    return f"the command ended with code {code} before the checked update{tail}"


class Patience:
    """Time for the program's first checkpoint, once all is checked: as long as it took so far, within bounds.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._until = folder, 0.0

    def over(self, passed_s: float) -> bool:
        """Whether nothing is waited for any longer."""
        self._until = self._until or passed_s + min(max(passed_s, LEAST_S), MOST_S)
        ranks = list(self._folder.glob("rank*"))
        return passed_s > self._until or not all((r / WAITS).is_file() for r in ranks)


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


def _complete(folder: Path) -> bool:
    ranks = list(folder.glob("rank*"))
    return bool(ranks) and all((r / "done").is_file() for r in ranks)
