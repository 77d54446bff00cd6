"""Generators of loader workers: looked at around the first batch of each epoch, inside the worker, and sent home.

A worker is inert, and may be forked or spawned. It appends one short JSON line an epoch to `workers.jsonl` in the folder
of the process that started it, which that process reads when a step ends.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from proctor.instrument.probes import _generators
from proctor.invariants.descriptor import opened

FILE: Final = "workers.jsonl"
_MAX_LINE: Final = 4000  # bytes; an append of this size is not interleaved with others
_MAX_READ: Final = 1 << 18
_MAX_FILE: Final = 1 << 22
_NAME: Final = 80
_EPOCHS: Final = 64  # of one worker
_MAX_WAITING: Final = 4096

Report = tuple[int, int, str, int, int]


def observe(run: str) -> None:
    """In a worker: report the generators of each epoch. Never raises into the worker's loop."""
    from torch.utils.data import _DatasetKind, get_worker_info

    parent = multiprocessing.parent_process()
    folder = None if parent is None else _folder(run, parent.pid or 0)
    if folder is None:
        return
    original = _DatasetKind.create_fetcher
    made = 0

    def create_fetcher(kind: Any, dataset: Any, *rest: Any, **named: Any) -> Any:
        nonlocal made
        before = _quietly(_look, dataset)
        fetcher = original(kind, dataset, *rest, **named)
        made += 1
        info = get_worker_info()
        if before and info is not None and made <= _EPOCHS:
            _watch_first(
                fetcher, dataset, before, folder / FILE, {"k": made, "w": info.id, "pid": os.getpid()}
            )
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_fetcher)


def _watch_first(
    fetcher: Any, dataset: Any, before: dict[str, int], path: Path, line: dict[str, Any]
) -> None:
    fetch = fetcher.fetch

    def first(index: Any) -> Any:
        del fetcher.fetch
        data = fetch(index)
        after = _quietly(_look, dataset) or {}
        moved = [(n[:_NAME], s, after[n]) for n, s in before.items() if after.get(n, s) != s]
        _quietly(_append, path, {**line, "g": moved})
        return data

    with contextlib.suppress(AttributeError):  # a fetcher with slots
        fetcher.fetch = first


def _look(dataset: Any) -> dict[str, int]:
    pairs = [*_generators.shared(), *_generators.held("dataset", dataset)]
    return {name: state for name, g in pairs if (state := _generators.digest(g)) is not None}


def _append(path: Path, line: dict[str, Any]) -> None:
    blob = (json.dumps(line, separators=(",", ":")) + "\n").encode()
    if len(blob) > _MAX_LINE:
        return
    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) as file:
        if os.fstat(file.number()).st_size < _MAX_FILE:
            file.append(blob)


def _quietly(function: Any, *args: Any) -> Any:
    """A worker has nobody to tell what went wrong with us."""
    with contextlib.suppress(Exception):
        return function(*args)
    return None


def _folder(run: str, pid: int) -> Path | None:
    return next((p for p in (Path(run) / "procs").glob(f"*-{pid}") if p.is_dir()), None)


class Reports:
    """Reads what workers of this process wrote."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._path: Path | None = None
        self._at = 0
        self._calls: dict[int, list[int]] = {}  # pid of a worker → calls that began its epochs
        self._expected = 0
        self._waiting: list[Report] = []

    def expect(self, pids: list[int], call: int) -> None:
        """These workers load for the loader whose `__iter__` is this call."""
        for pid in pids:
            self._calls.setdefault(pid, []).append(call)
        self._expected += len(pids)

    def take(self, fed: Mapping[int, bool]) -> Iterator[Report]:
        """Reports of loaders that feed the training: call, worker, generator, state before the first batch, and after it.

        Args:
            fed: by call, whether what it loads is for training; reports on calls that are not in it wait.
        """
        if self._expected:
            self._waiting += self._read()
        ready, self._waiting = self._waiting, []
        for report in ready:
            if fed.get(report[0]):
                yield report
            elif report[0] not in fed and len(self._waiting) < _MAX_WAITING:
                self._waiting.append(report)

    def _read(self) -> Iterator[Report]:
        if self._path is None:
            folder = _folder(self._run, os.getpid())
            if folder is None:
                return
            self._path = folder / FILE
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                blob = file.read(_MAX_READ)
        except OSError:
            return
        whole = blob[: blob.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._expected -= 1
            yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[Report]:
        try:
            report = json.loads(line)
            calls = self._calls.get(int(report["pid"]), [])
            call = calls[int(report["k"]) - 1]
            rows = [(call, int(report["w"]), str(n), int(a), int(b)) for n, a, b in report["g"]]
        except (ValueError, KeyError, TypeError, IndexError):
            return
        yield from rows

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
