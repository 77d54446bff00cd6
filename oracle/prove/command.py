"""Runs a command unchanged and takes the tapes of its first training step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from proctor.errors import OracleError, UsageError
from proctor.oracle.prove.tape import Tape, read
from proctor.oracle.recording.record import POLL_S, cause, end_process, program_of

_GRACE_S: Final = 0.3


def tapes_by_plan(command: Sequence[str], plan: Path, world: int, ranks: Sequence[int], *, timeout_s: float) -> list[Tape]:
    """Record one step of a program of one device as ranks of a plan would run it: a process a rank, one after the other.

    Raises:
        OracleError: as `tapes_of`; or the plan cannot work for the model.
    """
    return [tapes_of(command, timeout_s=timeout_s, said={"plan": str(plan.resolve()), "rank": rank, "world": world})[0] for rank in ranks]


def tapes_of(command: Sequence[str], *, timeout_s: float, said: Mapping[str, object] | None = None) -> list[Tape]:
    """Record one step of each rank.

    Args:
        command: the user's whole command line; it starts its own ranks.
        timeout_s: after which it is ended.
        said: what its processes are told besides (`attach.py`); then it is one rank.

    Raises:
        OracleError: it failed, trained nothing, or took too long.
        UsageError: it cannot be started.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: command not found")
    with tempfile.TemporaryDirectory(prefix="proctor-prove-") as name:
        folder = Path(name)
        environment = _environment(folder, said or {})
        log = folder / "output.log"
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    command, executable=program, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as e:
                raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None
            try:
                code = _wait(process, folder, timeout_s, program_of(command), bool(said))
            finally:
                end_process(process)
        ranks = _ranks(folder)
        if (folder / "refused").is_file():
            raise OracleError((folder / "refused").read_text().removeprefix("PR-E600").strip())
        if code and not all(_updated(folder, r) for r in ranks):
            raise OracleError(f"{program_of(command)}: ended with code {code} before its update{cause(log)}", hint="run it alone first")
        if not ranks:
            why = f"ended with code {code}" if code else "ended without training a torch module"
            raise OracleError(f"{program_of(command)}: {why}{cause(log)}", hint="run it alone first")
        if said:
            return [read(folder / f"rank{next(iter(ranks))}.tape")]
        world = max(ranks.values())
        absent = sorted(set(range(world)) - set(ranks))
        if absent:
            raise OracleError(f"{program_of(command)}: {len(absent)} of {world} ranks recorded nothing (rank {absent[0]}){cause(log)}")
        return [read(folder / f"rank{r}.tape") for r in range(world)]


def _environment(folder: Path, said: Mapping[str, object]) -> dict[str, str]:
    import proctor.instrument

    boot = folder / "boot"
    boot.mkdir()
    shutil.copyfile(Path(next(iter(proctor.instrument.__path__))) / "boot" / "sitecustomize.py", boot / "sitecustomize.py")
    (boot / "activation.json").write_text(json.dumps({"folder": str(folder), **said}))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(boot), environment.get("PYTHONPATH")]))
    environment["PROCTOR_PROVE"] = str(folder)
    environment["TORCHDYNAMO_DISABLE"] = "1"  # compiled regions have no operators that one could follow
    environment.pop("PROCTOR_RUN", None)
    environment.pop("PROCTOR_ORACLE", None)
    return environment


def _ranks(folder: Path) -> dict[int, int]:
    found = {}
    for path in folder.glob("rank*.json"):
        said = json.loads(path.read_text())
        found[said["rank"]] = said["world"]
    return found


def _updated(folder: Path, rank: int) -> bool:
    return bool(json.loads((folder / f"rank{rank}.json").read_text())["updated"])


def _wait(process: subprocess.Popen[bytes], folder: Path, timeout_s: float, program: str, alone: bool) -> int | None:
    began, complete = time.monotonic(), None
    while process.poll() is None:
        now = time.monotonic()
        if now - began > timeout_s:
            raise OracleError(f"{program}: took longer than {timeout_s:g} s", hint="--timeout SECONDS, or a smaller model")
        ranks = _ranks(folder)
        if complete is None and ranks and (alone or set(ranks) == set(range(max(ranks.values())))) and all(_updated(folder, r) for r in ranks):
            complete = now
        if complete is not None and now - complete > _GRACE_S:
            return None
        time.sleep(POLL_S)
    return process.returncode
