"""A folder of TrainCheck's traces becomes a run directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from proctor.errors import TraceError, UsageError
from proctor.infer.importers.traincheck.files import KINDS, Losses, find, read
from proctor.infer.importers.traincheck.parameters import Sources
from proctor.infer.importers.traincheck.process import ProcessWriter
from proctor.invariants.relations.traincheck.tables import PARAMETERS_FILE
from proctor.invariants.schema import TRACE_SCHEMA

MAX_PROCESSES: Final = 4096
_EVERY: Final = 50_000  # records between two calls of `progress`

Progress = Callable[[int], None]  # records read so far


@dataclass
class Imported:
    """What was read."""

    records: int = 0
    files: int = 0
    processes: int = 0
    notes: list[str] = field(default_factory=list)


def import_run(source: Path, target: Path, *, overwrite: bool = False, progress: Progress | None = None) -> Imported:
    """Read TrainCheck's traces and write a run directory; it appears only when it is whole.

    Args:
        source: folder with `trace_*.log`, `proxy_log.json` or gzipped ones, or one such file.
        target: the run directory.
        overwrite: replace a run that lies there.
        progress: called now and then with the number of records read.

    Raises:
        UsageError: something else lies at the target.
        TraceError: no traces there, none of their lines is a record, or the run cannot be written.
    """
    _refuse(target, overwrite=overwrite)
    files = find(source)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as scratch:
            made = Path(scratch) / "run"
            imported = _write(files, made, source.absolute().name, progress)
            if target.exists():
                shutil.rmtree(target)
            made.replace(target)
    except OSError as error:
        raise TraceError(f"{target}: cannot be written: {error.strerror or error}", hint="choose another -o") from None
    return imported


def _refuse(target: Path, *, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target} is a file, not a directory")
    if not any(target.iterdir()):
        return
    if not (target / "run.json").exists():
        raise UsageError(f"{target} is not empty and not a run directory", hint="choose another -o")
    if not overwrite:
        raise UsageError(f"{target} holds a run already", hint="choose another -o, or --overwrite")


def _write(files: list[Path], made: Path, program: str, progress: Progress | None) -> Imported:
    losses = Losses()
    out = Imported(files=len(files))
    writers: dict[int, ProcessWriter] = {}
    positional: set[str] = set()
    try:
        for line in read(files, losses):
            writer = writers.get(line.pid)
            if writer is None:
                if len(writers) >= MAX_PROCESSES:
                    raise TraceError(f"more than {MAX_PROCESSES} processes in one trace")
                writer = writers[line.pid] = ProcessWriter(made / "procs" / f"{len(writers)}-{line.pid}", line.pid)
            writer.add(line)
            if line.kind == KINDS["function_call (pre)"] and line.record.get("args"):
                positional.add(line.record["function"])
            out.records += 1
            if progress is not None and out.records % _EVERY == 0:
                progress(out.records)
    finally:
        for writer in writers.values():
            writer.close()
    if not writers:
        raise TraceError(
            f"{files[0].parent}: no TrainCheck record in {', '.join(f.name for f in files[:3])}",
            hint="name the folder that traincheck-collect wrote",
        )
    out.processes = len(writers)
    out.notes = losses.notes()
    unmatched = sum(w.unmatched for w in writers.values())
    if unmatched:
        out.notes.append(f"left out records of calls without a counterpart: {unmatched}")
    _describe(made, list(writers.values()), program, cut=bool(losses.cut))
    sources = Sources()
    known = {name: found for name in sorted(positional) if (found := sources.parameters(name)) is not None}
    _dump(made / PARAMETERS_FILE, known)
    _dump(
        made / "run.json",
        {
            "schema": TRACE_SCHEMA,
            "command": [],
            "program": program,
            "importer": "traincheck",
            "source": program,
            "files": len(files),
            "records": out.records,
            "notes": out.notes,
        },
    )
    return out


def _describe(made: Path, writers: list[ProcessWriter], program: str, *, cut: bool) -> None:
    """`process.json` of every process, and its folder under its rank."""
    ranks = _ranks(writers)
    for writer, rank in zip(writers, ranks, strict=True):
        notes = [f"calls that never returned: {writer.unreturned}"] if writer.unreturned else []
        _dump(
            writer.folder / "process.json",
            {
                "rank": rank,
                "world": len(writers),
                "pid": writer.pid,
                "coords": writer.ranks,
                "dropped": 0,
                "notes": notes,
                "finished": not cut,
            },
        )
        final = made / "procs" / f"{rank}-{writer.pid}"
        if final != writer.folder:
            writer.folder.rename(final)


def _ranks(writers: list[ProcessWriter]) -> list[int]:
    """Ranks that the program told, if they are those of a whole job; else processes by their number."""
    told = [w.ranks.get("dp") for w in writers]
    if sorted(t for t in told if t is not None) == list(range(len(writers))):
        return [t for t in told if t is not None]
    order = sorted(range(len(writers)), key=lambda i: writers[i].pid)
    return [order.index(i) for i in range(len(writers))]


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
