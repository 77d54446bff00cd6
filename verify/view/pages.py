"""The report of a run that may still be written, made again when its files have changed, at a bounded cost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from proctor.errors import ProctorError
from proctor.verify.report import Report
from proctor.verify.report.beside import INCIDENTS, read_beside
from proctor.verify.report.formats import html
from proctor.verify.report.load import load

LARGEST: Final = 512 * 1024 * 1024  # bytes of records, beyond which a report is not made while a run goes on
LEAST_S: Final = 3.0  # between two reports
SHARE: Final = 8.0  # a report may take an eighth of one core

_log = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int], ...]


class Pages:
    """Makes and keeps the report of one run; safe to be used from several threads.

    Args:
        run: the run directory.
        clock: seconds that only go forward.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: Signature | None = None
        self._report = Report(None)
        self._body = ""
        self._made = float("-inf")
        self._took = 0.0

    def outdated(self) -> bool:
        """Whether the files have changed since the last report, and it may be made again."""
        due = self._made + max(LEAST_S, SHARE * self._took)
        return self._clock() >= due and self.signature() != self._seen

    def body(self) -> str:
        """Header and main part of the report."""
        self._refresh()
        return self._body

    def page(self, frame: html.Frame) -> str:
        """The whole page."""
        self._refresh()
        return html.render(self._report, frame)

    def signature(self) -> Signature:
        """Names, times and sizes of the files that the report is made from."""
        found = [self.run / "check.json", self.run / INCIDENTS, *sorted(self.run.glob("procs/*/*.arrow"))]
        rows = []
        for path in found:
            try:
                status = path.stat()
            except OSError:
                continue
            rows.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(rows)

    def _refresh(self) -> None:
        with self._lock:
            if not self.outdated():
                return
            seen, start = self.signature(), self._clock()
            try:
                self._report = self._load(sum(size for _, _, size in seen))
            except ProctorError as error:
                self._report = Report(None, coverage_notes=[f"the run cannot be read: {error.message}"])
            except Exception as error:  # noqa: BLE001  a file that changes under the reader must not end the view
                _log.info("the report could not be made", exc_info=True)
                self._report = Report(None, coverage_notes=[f"the report could not be made now ({type(error).__name__})"])
            self._body = html.body(self._report)
            self._seen, self._made = seen, self._clock()
            self._took = self._made - start

    def _load(self, size: int) -> Report:
        if size > LARGEST:
            notes = [f"{size / 2**20:,.0f} MiB of records are too many to be drawn while the run goes on: proctor report RUN"]
            return Report(None, beside=read_beside(self.run), coverage_notes=notes)
        return load(self.run)
