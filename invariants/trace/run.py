"""A recorded run for people and notebooks: `proctor.open_run`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from proctor.invariants.schema import Name, Value
from proctor.invariants.trace.merge import read_json
from proctor.invariants.trace.process import Process
from proctor.invariants.trace.trace import Trace


class Run:
    """A recorded run for people and notebooks: frames with names resolved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = Trace.load([path], lives=True)
        self.info: dict[str, Any] = read_json(path / "run.json")

    def _named(self, frame: pl.DataFrame, column: str, kind: Name) -> pl.DataFrame:
        texts = pl.DataFrame(
            {column: pl.Series(range(len(self.trace.texts[kind])), dtype=pl.UInt32), "_t": self.trace.texts[kind]}
        )
        return frame.join(texts, on=column, how="left", maintain_order="left").with_columns(
            pl.col("_t").alias(column)
        ).drop("_t")

    def _with_context(self, frame: pl.DataFrame) -> pl.DataFrame:
        frame = frame.join(self.trace.contexts.drop("proc"), on="ctx", how="left", maintain_order="left").drop("ctx")
        return frame.join(self.trace.procs.drop("run", "program"), on="proc", how="left", maintain_order="left").drop("proc")

    @cached_property
    def calls(self) -> pl.DataFrame:
        """One row a call: function, source, arguments, result, times, step, phase, rank."""
        frame = self.trace.calls
        for column, kind in (("fn", Name.FUNCTION), ("site", Name.SITE), ("args", Name.SIGNATURE), ("ret", Name.SIGNATURE)):
            frame = self._named(frame, column, kind)
        return self._with_context(frame)

    @cached_property
    def states(self) -> pl.DataFrame:
        """One row a change of a variable: name, attribute, fingerprint, norm, flags, step, rank."""
        frame = self.trace.states.join(self.trace.variables, on="var", how="left", maintain_order="left")
        frame = frame.join(self.trace.metas, on="meta", how="left", maintain_order="left").drop("var")
        return self._with_context(frame.drop("meta"))

    @cached_property
    def values(self) -> pl.DataFrame:
        """One row a value seen at a call: kind, place, fingerprint or number, step, rank."""
        frame = self._named(self.trace.values, "place", Name.PLACE)
        kinds = {int(kind): kind.name.lower() for kind in Value}
        frame = frame.with_columns(pl.col("kind").replace_strict(kinds, default="", return_dtype=pl.String))
        frame = frame.join(self.trace.metas, on="meta", how="left", maintain_order="left").drop("meta")
        return self._with_context(frame)

    @cached_property
    def context(self) -> pl.DataFrame:
        return self.trace.contexts

    @property
    def processes(self) -> list[Process]:
        return self.trace.processes

    def __repr__(self) -> str:
        t = self.trace
        return f"<Run {self.path}: {len(t.processes)} processes, {t.steps} steps, {t.calls.height} calls, {t.states.height} states>"


def open_run(path: str | Path) -> Run:
    """Open a run directory; see `proctor.open_run`."""
    return Run(Path(path))
