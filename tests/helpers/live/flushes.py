"""A recorded run as its processes let go of it: rows in the order of their calls, with the names and contexts they need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from proctor.invariants.schema import TABLES
from proctor.invariants.trace.tables import read_stream

Flush = tuple[str, dict[str, pa.Table], dict[str, Any], int]
"""Process, records, `process.json`, and the step that the process is in."""


class Recorded:
    """One process of a recorded run."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.info = json.loads((folder / "process.json").read_bytes())
        self.tables = {name: read_stream(folder / f"{name}.arrow", name)[0] for name in TABLES}
        steps = dict(zip(*(self.tables["context"][c].to_pylist() for c in ("ctx", "step")), strict=True))
        self._steps = {t: np.array([steps.get(c, -1) for c in self.tables[t]["ctx"].to_pylist()]) for t in ("calls", "states", "values")}
        self._ctx = {step: [c for c, s in steps.items() if s == step] for step in set(steps.values())}
        # A call's row is written when it returns: with the latest step of any call before it.
        self._when = {t: np.maximum.accumulate(s) if len(s) else s for t, s in self._steps.items()}

    @property
    def last(self) -> int:
        return max(self._ctx, default=-1)

    def step(self, step: int) -> Flush:
        """What it lets go of when this step ends; names come with the first."""
        return self.steps(step, step)

    def steps(self, first: int, last: int) -> Flush:
        """What it lets go of when `last` ends and nothing since `first` began; names come with the first."""
        part = {t: self.tables[t].filter(pa.array((when >= first) & (when <= last))) for t, when in self._when.items()}
        codes = pa.array([code for step in range(first, last + 1) for code in self._ctx.get(step, [])], type=pa.uint32())
        context = self.tables["context"]
        part["context"] = context.filter(pa.compute.is_in(context["ctx"], value_set=codes))
        if first < 0:
            part["names"] = self.tables["names"]
        return self.name, part, {**self.info, "finished": False}, last + 1


def flushes(run: Path) -> Iterator[Flush]:
    """All processes of a run, step by step."""
    members = [Recorded(folder) for folder in sorted((run / "procs").iterdir())]
    for step in range(-1, max(member.last for member in members) + 1):
        for member in members:
            if step <= member.last:
                yield member.step(step)


def uneven(run: Path, random: Random, most: int = 12) -> Iterator[Flush]:
    """The same with several steps at once, at most `most`, processes that are ahead of each other, and some of a step before the rest of it."""
    members = {member: -1 for member in (Recorded(folder) for folder in sorted((run / "procs").iterdir()))}
    while members:
        member = random.choice([*members])
        first = members[member]
        last = min(member.last, first + random.choice((0, 0, 1, random.randrange(most))))
        name, part, info, reached = member.steps(first, last)
        if random.random() < 0.5:  # in the midst of the last one
            there = {t: len(table) if t in ("names", "context") else random.randrange(len(table) + 1) for t, table in part.items()}
            yield name, {t: table.slice(0, there[t]) for t, table in part.items()}, info, last
            part = {t: table.slice(there[t]) for t, table in part.items()}
        yield name, part, info, reached
        members[member] = last + 1
        if last == member.last:
            del members[member]
