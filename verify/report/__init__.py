"""Reports of a check: `formats/` has one file a format, each with `render(report) -> str`, found by listing the folder.

`load` reads a run directory as a report, `keep` writes what a check leaves beside the run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from proctor.invariants.files import replace_file
from proctor.verify.report import formats

if TYPE_CHECKING:
    from proctor.invariants.trace import Trace
    from proctor.invariants.verdict import CheckResult
    from proctor.verify.report.beside import Beside

# A file `json_.py` is the format "json": without the underscore it would read like the standard library's.
_FILES: Final = {m.name.rstrip("_"): m.name for m in pkgutil.iter_modules(formats.__path__)}
FORMATS: Final = tuple(sorted(_FILES))


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
    return cast(Format, importlib.import_module(f"{formats.__name__}.{_FILES[name]}"))


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
