"""Windows of steps of a long run, each with the context that relations need to judge it.

A window is a trace like any other, only that steps are missing from it, as they are from a run that was recorded with
`--every`. It holds the records of its core, the steps whose examples count, and around it:

* what came before training and its first steps, from which relations learn what kind of program it is;
* some steps before and after the core, since a gradient is cleared in the step before, and what an update left undone
  shows in the step after;
* the last state of every variable from the time before, since a variable keeps its value until a row says otherwise.

What a relation concludes from a whole run (that an argument is the same in all calls) it concludes from what a window
holds, so that windows see less than the whole: use them where the whole does not fit into memory or is not over yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from proctor.invariants.schema import STATES

if TYPE_CHECKING:
    from proctor.invariants.trace import Trace

Array = np.ndarray[Any, Any]

PROLOGUE: Final = 3  # first steps of a run that every window holds
REACH: Final = 3  # steps before and after the core
FOREVER: Final = 1 << 30  # the end of the last window


@dataclass(frozen=True, order=True)
class Window:
    """Steps `first` to `end` (not included); the first window begins before training, at -1.

    Args:
        reach: steps around them that it holds, too.
        now: the step that a run has come to, when it is not over: nothing later is held.
    """

    first: int
    end: int
    reach: int = REACH
    now: int = FOREVER

    @property
    def last(self) -> bool:
        """Whether it holds all that comes behind its first step."""
        return self.end >= FOREVER and self.now >= FOREVER

    def core(self, steps: pl.Expr) -> pl.Expr:
        """Whether examples of these steps count; those of no particular step do in the first window."""
        inside = (steps >= self.first) & (steps < self.end)
        return inside.fill_null(value=self.first < 0)

    def keeps(self, steps: Array) -> Array:
        """Whether records of these steps belong to it."""
        kept: Array = (steps < PROLOGUE) | ((steps >= self.first - self.reach) & (steps < self.end + self.reach))
        return kept & (steps <= self.now)

    def before(self, steps: Array) -> Array:
        """Whether records of these steps are older than all but the prologue."""
        old: Array = steps < self.first - self.reach
        return old


def spread(steps: int, size: int, reach: int = REACH) -> list[Window]:
    """Windows of `size` steps that cover a run of `steps`, the last one open."""
    bounds = [-1, *range(size, max(steps, 1), size), FOREVER]
    return [Window(a, b, reach) for a, b in pairwise(bounds)]


def cut(trace: Trace, window: Window) -> Trace:
    """The part of a trace that a window holds; codes stay what they are."""
    steps = steps_by_context(trace.contexts)

    def kept(frame: pl.DataFrame, carry: Callable[[Array], Array] | None = None) -> pl.DataFrame:
        if frame.is_empty():
            return frame
        of = take(steps, frame["ctx"].to_numpy())
        mask = window.keeps(of)
        if carry is not None:
            mask[carry(~mask & window.before(of))] = True
        return frame.filter(pl.Series(mask))

    def last_of_each(old: Array) -> Array:
        rows = np.flatnonzero(old)
        key = trace.states["proc"].to_numpy()[rows].astype(np.int64) << 32 | trace.states["var"].to_numpy()[rows]
        _, last = np.unique(key[::-1], return_index=True)
        found: Array = rows[len(rows) - 1 - last]
        return found

    states = kept(trace.states, last_of_each)
    used = np.unique(states["ctx"].to_numpy()) if states.height else np.zeros(0, dtype=np.uint32)
    mine = window.keeps(trace.contexts["step"].to_numpy()) | np.isin(trace.contexts["ctx"].to_numpy(), used)
    part = replace(
        trace,
        calls=kept(trace.calls),
        states=states,
        values=kept(trace.values),
        contexts=trace.contexts.filter(pl.Series(mine)) if len(mine) else trace.contexts,
        ends=trace.ends and window.last,
    )
    if trace.states.width:
        part.held = trace.states.select("proc", "var").unique() if trace.held is None else trace.held
    part.__dict__.update({k: trace.__dict__[k] for k in NAMES if k in trace.__dict__})
    return part


NAMES: Final = ("features", "variables", "metas", "function_code")  # views of a trace's texts, equal for all its parts


def steps_by_context(contexts: pl.DataFrame) -> Array:
    """Step by context code, -1 where there is none."""
    codes = contexts["ctx"].to_numpy()
    steps = np.full(int(codes.max(initial=0)) + 1, -1, dtype=np.int32)
    steps[codes] = contexts["step"].fill_null(-1).to_numpy()
    return steps


def take(steps: Array, codes: Array) -> Array:
    """Steps of context codes; of unknown ones -1."""
    taken: Array = steps[np.where(codes < len(steps), codes, 0)]
    return np.where(codes < len(steps), taken, -1)


class Sieve:
    """Lets through those rows of one process's tables, batch by batch, that a window holds.

    Args:
        window: whose rows.
        contexts: ctx and step of the process, local codes.
    """

    def __init__(self, window: Window, contexts: pl.DataFrame) -> None:
        self.window, self.steps = window, steps_by_context(contexts)
        self._carried = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([], schema=STATES)))
        self._variables: set[int] = set()

    def rows(self, table: str, batch: pl.DataFrame) -> pl.DataFrame:
        """The rows of a batch to keep; of states that are older, the last of each variable is remembered."""
        of = take(self.steps, batch["ctx"].to_numpy())
        mask = self.window.keeps(of)
        if table == "states":
            self._variables.update(batch["var"].unique().to_list())
            old = ~mask & self.window.before(of)
            if old.any():
                both = pl.concat([self._carried, batch.filter(pl.Series(old))])
                self._carried = both.unique("var", keep="last", maintain_order=True)
        return batch.filter(pl.Series(mask))

    def carried(self) -> pl.DataFrame:
        """The last older state of each variable."""
        return self._carried

    def variables(self) -> Array:
        """Codes of all variables that there are states of, kept or not."""
        return np.array(sorted(self._variables), dtype=np.int64)

    def contexts(self, contexts: pl.DataFrame) -> pl.DataFrame:
        """Those of the rows that were kept."""
        mine = self.window.keeps(contexts["step"].fill_null(-1).to_numpy())
        return contexts.filter(pl.Series(mine) | contexts["ctx"].is_in(self._carried["ctx"].unique().implode()))


def reach_of(relations: Iterable[Any]) -> int:
    """Steps around a core that all of these relations need."""
    asked: Sequence[int] = [r.reach for r in relations if getattr(r, "reach", None) is not None]
    return max([REACH, *asked])
