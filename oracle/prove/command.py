"""Runs a command unchanged and takes the tapes of its first training step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.prove.tape import Tape, read
from proctor.oracle.recording.record import program_of
from proctor.oracle.recording.running import LOG, cause, run_hooked


def tapes_by_plan(command: Sequence[str], plan: Path, mesh: Mesh, ranks: Sequence[int], *, timeout_s: float) -> list[Tape]:
    """Record one step of a program of one device as ranks of a plan would run it: a process a rank, one after the other.

    Args:
        plan: its rules hold.
        mesh: the plan's, or another one with the same axes.

    Raises:
        OracleError: as `tapes_of`; or the plan cannot work for the model.
    """
    return [tapes_of(command, timeout_s=timeout_s, said={"plan": str(plan.resolve()), "mesh": str(mesh), "rank": rank})[0] for rank in ranks]


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
    with tempfile.TemporaryDirectory(prefix="proctor-prove-") as name:
        folder = Path(name)
        log = folder / LOG

        def complete() -> bool:
            ranks = _ranks(folder)
            return bool(ranks) and (bool(said) or set(ranks) == set(range(max(ranks.values())))) and all(_updated(folder, r) for r in ranks)

        def look(_: int, passed_s: float) -> None:
            if passed_s > timeout_s:
                raise OracleError(f"{program_of(command)}: took longer than {timeout_s:g} s", hint="--timeout SECONDS, or a smaller model")

        code = run_hooked(
            command,
            folder,
            json.dumps({"folder": str(folder), **(said or {})}).encode(),
            mark="PROCTOR_PROVE",
            value=str(folder),
            variables={"TORCHDYNAMO_DISABLE": "1"},  # compiled regions have no operators that one could follow
            complete=complete,
            look=look,
        )
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


def _ranks(folder: Path) -> dict[int, int]:
    found = {}
    for path in folder.glob("rank*.json"):
        said = json.loads(path.read_text())
        found[said["rank"]] = said["world"]
    return found


def _updated(folder: Path, rank: int) -> bool:
    return bool(json.loads((folder / f"rank{rank}.json").read_text())["updated"])
