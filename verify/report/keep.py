"""What a check leaves beside the run: `violations.jsonl`, `check.json` and `report.html`.

`proctor check` and the verifier call it with a finished report. The report comes back with the place of its page; a folder
that cannot be written gives a sentence instead of an error, since there is a verdict all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from proctor.verify.report import Report, write_text
from proctor.verify.report.formats import html
from proctor.verify.report.formats import json_ as jsonout


def keep(report: Report, folder: Path) -> tuple[Report, str]:
    """Write the reports beside the run; where that is impossible, say why."""
    violations = report.result.violations if report.result is not None else []
    files: dict[str, Callable[[], str]] = {
        "violations.jsonl": lambda: jsonout.lines(violations),
        "check.json": lambda: jsonout.render(report),
        "report.html": lambda: html.render(report),
    }
    for name, text in files.items():
        try:
            write_text(folder / name, text(), mode=0o600)
        except OSError as error:
            return report, f"{folder / name} was not written: {error.strerror or error}"
    return replace(report, page=str(folder / "report.html")), ""
