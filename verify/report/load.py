"""A run directory as a report: what was recorded, and what its last check and its verifier said."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from proctor.invariants.trace import Run
from proctor.verify.coverage import coverage
from proctor.verify.report import Report
from proctor.verify.report.beside import read_beside
from proctor.verify.report.formats import json_ as jsonout
from proctor.verify.wording import EXIT_CLEAN, EXIT_INCONCLUSIVE


def load(folder: Path) -> Report:
    """Read a run with the result of its last check, if there was one.

    Raises:
        TraceError: it is not a run directory that we read.
    """
    opened = Run(folder)
    seen = coverage(opened.trace)
    saved = jsonout.read(folder / "check.json")
    nothing = opened.trace.calls.is_empty() and opened.trace.states.is_empty()
    result, code, packs = saved or (None, EXIT_INCONCLUSIVE if nothing or not seen.complete else EXIT_CLEAN, [])
    return Report(
        result=result,
        trace=opened.trace,
        info=opened.info,
        exit_code=code,
        packs=packs,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
        beside=read_beside(folder),
        coverage_notes=seen.notes,
    )
