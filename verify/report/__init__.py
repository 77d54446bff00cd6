"""Reports of a check: one file a format, each with `render(report) -> str`.

To add a format, write the file and name it in `FORMATS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from proctor.invariants.files import replace_file

if TYPE_CHECKING:
    from proctor.invariants.trace import Trace
    from proctor.invariants.verdict import CheckResult
    from proctor.verify.report.beside import Beside

FORMATS: Final = ("terminal", "json", "sarif", "junit", "github", "html")
_FILES: Final = {"json": "jsonout"}  # a file called json.py would read like the standard library's


@dataclass(frozen=True)
class Report:
    """What a report speaks of.

    result: what a check found; `None` when nothing was checked.
    trace: the records, for the pictures and the summary.
    info: `run.json` of the run.
    packs: files the rules came from, as the user named them.
    made: when the report was made, for a reader.
    page: the HTML report beside the run, "" without one.
    missing: per run, ranks that left no record.
    beside: incidents that a verifier followed, and capsules.
    coverage_notes: what the records cannot show, for a run that was not checked.
    """

    result: CheckResult | None
    trace: Trace | None = None
    info: Mapping[str, Any] = field(default_factory=dict)  # JSON of whoever recorded
    exit_code: int = 0
    packs: Sequence[str] = ()
    everything: bool = False
    made: str = ""
    page: str = ""
    missing: Mapping[int, Sequence[int]] = field(default_factory=dict)
    beside: Beside = field(default_factory=lambda: _nothing_beside())
    coverage_notes: Sequence[str] = ()


def _nothing_beside() -> Beside:
    from proctor.verify.report.beside import Beside  # late: naming the formats reads no trace

    return Beside()


class Format(Protocol):
    """A report module."""

    def render(self, report: Report) -> str: ...


def renderer(name: str) -> Format:
    """The module of a format."""
    return cast(Format, importlib.import_module(f"{__name__}.{_FILES.get(name, name)}"))


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a whole file or none of it; a link at `path` is replaced, never followed.

    Args:
        path: of the file.
        text: what it holds.
        mode: of a new file, before the umask.

    Raises:
        OSError: the folder is not writable, or `path` is a folder.
    """
    replace_file(path, text.encode(errors="backslashreplace"), mode=mode)
