"""Records of one process of a run that goes on: what arrived, how far it reaches, and what of it is still needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl
import pyarrow as pa

from proctor.errors import TraceError
from proctor.invariants.schema import TABLES
from proctor.invariants.windows import Sieve, Window

_TIMED: Final = ("calls", "states", "values")  # tables whose rows belong to a step
_MARKS: Final = ("calls", "states")  # of these, those that any process of a training run has


class Live:
    """What one process has told so far.

    Args:
        folder: a name of it.
        patience: steps of calls after which a process without a single state is taken to have none.
    """

    def __init__(self, folder: str, patience: int) -> None:
        self.folder, self._patience = folder, patience
        self.info: dict[str, Any] = {}
        self.rows = 0  # records that are held
        self._held: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._steps: dict[int, int] = {}  # by context code
        self._unplaced: dict[str, set[int]] = {name: set() for name in _MARKS}  # contexts that are not told yet
        self._last: dict[str, int] = {}

    @property
    def trains(self) -> bool:
        return bool(self._last)

    @property
    def reached(self) -> int:
        """The last step that all its tables have rows of, so that the steps before are finished; -1 without any."""
        least = min(self._last.values(), default=-1)
        return least if len(self._last) == len(_MARKS) else max(-1, least - self._patience)

    @property
    def world(self) -> int:
        """Ranks of its job, as far as it said."""
        said = self.info.get("world")
        return said if isinstance(said, int) and not isinstance(said, bool) and 0 < said < 1 << 20 else 1

    def add(self, records: Mapping[str, pa.Table | pa.RecordBatch], info: Mapping[str, Any] | None) -> None:
        """Raises `TraceError` for a table that no trace has, or one with other columns."""
        if info is not None:
            self.info = dict(info)
        for name, rows in records.items():
            if name not in TABLES or not rows.schema.equals(TABLES[name]):
                raise TraceError(f"{self.folder}: records of {name!r} do not have the columns of a trace")
            if not rows.num_rows:
                continue
            table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
            self._held[name].append(table)
            if name in _TIMED:
                self.rows += rows.num_rows
            if name == "context":
                self._steps.update(zip(table["ctx"].to_pylist(), (s or 0 for s in table["step"].to_pylist())))
            if name in _MARKS:
                self._unplaced[name].update(table["ctx"].unique().to_pylist())
        for name, contexts in self._unplaced.items():
            known = contexts & self._steps.keys()
            if known:
                self._last[name] = max(self._last.get(name, -1), max(self._steps[c] for c in known))
                contexts -= known

    def part(self) -> tuple[dict[str, Any], str, dict[str, pa.Table]]:
        """Its info, folder and tables as they are now."""
        for name, tables in self._held.items():
            if len(tables) > 1:
                self._held[name] = [pa.concat_tables(tables)]
        whole = {
            name: held[0] if held else pa.Table.from_batches([], schema=TABLES[name]) for name, held in self._held.items()
        }
        return self.info, self.folder, whole

    def forget(self, following: Window) -> None:
        """Keep only what this window and later ones need."""
        _, _, tables = self.part()
        contexts = pl.DataFrame(pl.from_arrow(tables["context"])).unique("ctx", keep="last", maintain_order=True)
        sieve = Sieve(following, contexts)
        self.rows = 0
        for name in _TIMED:
            kept = sieve.rows(name, pl.DataFrame(pl.from_arrow(tables[name])))
            if name == "states":
                kept = pl.concat([sieve.carried(), kept])
            self._held[name] = [kept.to_arrow().cast(TABLES[name])]
            self.rows += kept.height
        left = sieve.contexts(contexts)
        self._held["context"] = [left.to_arrow().cast(TABLES["context"])]
