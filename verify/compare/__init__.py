"""What differs between two recorded runs before the first number does, and where numbers part.

`proctor compare` calls `compare_runs` with two runs and hands the outcome to one of the formats, one file each:

    arguments      --lr 0.001 against 0.0005
    versions       numpy 1.26.4 against 2.1.0
    data order     the same batches in another order, from the first on
    parameters     the same 38 at start
    first apart    step 0, rank 0: batch 0 of the model's call …

Everything is read from the records: nothing is run, and what was not recorded is said, not guessed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proctor.invariants.trace import Run

FORMATS: Final = ("terminal", "json", "html")
_FILES: Final = {"json": "jsonout"}


@dataclass(frozen=True)
class Difference:
    """One thing that the runs do not have in common; "" where one lacks it."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Section:
    """One kind of thing that was compared.

    name: in a word or two.
    compared: how many things.
    differences: of these, in reading order.
    note: what could not be compared, and why.
    """

    name: str
    compared: int
    differences: list[Difference] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Parting:
    """A value that is another in the second run.

    step, rank: -1 is before the first step.
    kind: parameter, gradient, buffer, optimizer state, batch, …
    name: of the variable, or the place in a call.
    first, second: what is known of the values: norms, numbers or that one is missing.
    where: the function at which it was seen, and its line.
    """

    step: int
    rank: int
    kind: str
    name: str
    first: str
    second: str
    where: str = ""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    first, second: the runs.
    sections: what was compared besides numbers.
    partings: values that differ in the first step in which any does, the earliest first; bounded.
    apart: how many these are.
    values, steps: values that were compared, over how many steps.
    notes: what the records cannot show.
    """

    first: str
    second: str
    sections: list[Section]
    partings: list[Parting]
    apart: int
    values: int
    steps: int
    notes: list[str] = field(default_factory=list)

    @property
    def parted(self) -> Parting | None:
        """The first value that differs."""
        return self.partings[0] if self.partings else None

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return bool(self.partings) or any(section.differences for section in self.sections)

    @property
    def said(self) -> str:
        """The outcome in one line."""
        before = sum(len(section.differences) for section in self.sections)
        what = f"{before} thing{'s differ' if before != 1 else ' differs'} before the first number does" if before else "nothing differs beforehand"
        if self.parted is not None:
            when = f"in step {self.parted.step}" if self.parted.step >= 0 else "before the first step"
            return f"{what}; the numbers part {when}: {self.parted.kind} {self.parted.name}"
        if not self.values:
            return f"{what}; no number could be compared"
        return f"{what}; {self.values} values of {self.steps} steps are the same"


def compare_runs(first: Run, second: Run) -> Comparison:
    """Compare two recorded runs.

    Raises:
        TraceError: a file of theirs cannot be read.
    """
    from proctor.verify.compare._numbers import numbers_of
    from proctor.verify.compare._sections import sections_of

    numbers = numbers_of(first, second)
    notes = [*numbers.notes, *(f"{name}: {note}" for name, run in (("first", first), ("second", second)) for note in run.trace.notes[:5])]
    return Comparison(
        str(first.path), str(second.path), sections_of(first, second), numbers.partings, numbers.apart, numbers.values, numbers.steps, notes
    )


def renderer(name: str) -> ModuleType:
    """The module of a format; it has `render(comparison) -> str`."""
    return importlib.import_module(f"{__name__}.{_FILES.get(name, name)}")
