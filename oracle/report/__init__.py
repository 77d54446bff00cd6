"""Reports of a comparison: one file a format, each with `render(report) -> str`.

To add a format, write the file and name it in `FORMATS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from proctor.oracle.judging.verdicts import Verdict

FORMATS: Final = ("terminal", "json", "html")
_FILES: Final = {"json": "jsonout"}  # a file called json.py would read like the standard library's


@dataclass(frozen=True)
class Proof:
    """What `oracle prove` says of the same commands: for all data, where the comparison is of one run's.

    verdict: "PROVED", "EQUAL", "CLOSE", "UNPROVED" or "DIFFERENT".
    why, where: one sentence each; where may be "".
    holds: what it holds for.
    """

    verdict: str
    why: str
    where: str = ""
    holds: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a report speaks of.

    verdict: what the comparison found.
    reference, candidate: directories of the recordings, as the user named them.
    reference_command, candidate_command: what ran.
    mesh: of the candidate, `dp=2 tp=2`.
    world: ranks of the candidate.
    samples, mode: of the noise behind the tolerances.
    made: when the report was made, for a reader.
    page: the HTML report, "" without one.
    next_steps: commands worth trying, best first.
    everything: all wrong tensors, not the worst ones.
    proof: None where none was asked for.
    """

    verdict: Verdict
    reference: str = ""
    candidate: str = ""
    reference_command: str = ""
    candidate_command: str = ""
    mesh: str = ""
    world: int = 0
    samples: int = 0
    mode: str = "all"
    made: str = ""
    page: str = ""
    next_steps: Sequence[str] = ()
    everything: bool = False
    proof: Proof | None = None

    @property
    def exit_code(self) -> int:
        """Of the comparison; 1 also where a proof says that the programs differ."""
        return 1 if self.proof is not None and self.proof.verdict == "DIFFERENT" else self.verdict.exit_code


class Format(Protocol):
    """A report module."""

    def render(self, report: Report) -> str: ...


def renderer(name: str) -> Format:
    """The module of a format."""
    return cast(Format, importlib.import_module(f"{__name__}.{_FILES.get(name, name)}"))
