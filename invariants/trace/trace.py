"""All records of one or more runs, as relations read them: frames of integer codes, and what the codes stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from proctor.invariants.codec import signature
from proctor.invariants.schema import Name
from proctor.invariants.trace.merge import Merge
from proctor.invariants.trace.names import decode_variable, flat_meta, metas_frame, variables_frame
from proctor.invariants.trace.process import Process
from proctor.invariants.trace.tables import empty
from proctor.invariants.trace.windows import Window

_UPDATES = ("torch.optim.Optimizer.step", "torch.amp.GradScaler.step")


@dataclass
class Trace:
    """All records of one or more runs, with codes that are global to this object.

    calls: proc u16, seq, parent, fn, site, ctx, args, ret, t, dur, flags
    states: proc u16, seq, call, edge, ctx, var, meta, fp, norm, flags
    values: proc u16, seq, ctx, kind, place, item, meta, fp, norm, number, flags
    contexts: ctx, proc, step, micro, phase, grad, autocast, outer, recompute, meta
    """

    processes: list[Process]
    runs: list[str]
    calls: pl.DataFrame
    states: pl.DataFrame
    contexts: pl.DataFrame
    texts: dict[Name, list[str]]
    notes: list[str] = field(default_factory=list)
    values: pl.DataFrame = field(default_factory=lambda: empty("values"))
    held: pl.DataFrame | None = None  # of a window: proc, var of all variables that the whole has states of
    past: dict[str, pl.DataFrame] = field(default_factory=dict)  # of a run that goes on: what relations remember of it
    ends: bool = True  # nothing comes behind what it holds; not so of a window that others follow
    over: int = -2  # of a run that goes on: the last step that all processes have ended
    since: int = 1 << 30  # of a run that goes on: the first of the steps that are judged now
    hang_after_s: float = math.inf  # of a run that goes on: a longer wait for another rank is told, whatever a rule grants
    # What relations have looked up in it, by name (`relations.views.cache`); a trace that is made of this one has its own.
    views: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    # What follows from its texts alone: windows of a run that goes on share it.
    lasting: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, paths: Sequence[str | Path], window: Window | None = None, *, lives: bool = False) -> Trace:
        """Read and merge run directories.

        Args:
            paths: of the runs.
            window: keep only what it holds; never more than that is in memory.
            lives: each life of a job that an elastic launcher has started again is a run of its own, so that its ranks are
                compared. Without it a rank that is there twice is compared with none.

        Raises:
            TraceError: a path is not a run directory of a schema that we read, or holds no process at all.
        """
        merge = Merge(window)
        for path in paths:
            merge.add(Path(path), lives=lives)
        return cls(**merge.fields())

    # -- names --------------------------------------------------------------------------------------------

    @property
    def functions(self) -> list[str]:
        return self.texts[Name.FUNCTION]

    @property
    def sites(self) -> list[str]:
        return self.texts[Name.SITE]

    @property
    def places(self) -> list[str]:
        return self.texts.get(Name.PLACE, [""])

    @cached_property
    def function_code(self) -> dict[str, int]:
        return {text: code for code, text in enumerate(self.functions)}

    @cached_property
    def features(self) -> list[dict[str, signature.Plain]]:
        """Flattened signature of every signature code."""
        return [signature.features(text) for text in self.texts[Name.SIGNATURE]]

    @cached_property
    def left_out(self) -> dict[int, frozenset[str]]:
        """Features that a signature does not tell although the call had them, by signature code; only where there are any."""
        texts = self.texts.get(Name.SIGNATURE, [])
        return {code: missing for code, text in enumerate(texts) if (missing := signature.left_out(text))}

    @cached_property
    def variables(self) -> pl.DataFrame:
        """One row a variable code: var, model, name, attr, role, module, kind, position, alias."""
        return variables_frame([decode_variable(text) for text in self.texts[Name.VARIABLE]])

    @cached_property
    def metas(self) -> pl.DataFrame:
        """One row a meta code: meta, and one text column for each attribute seen, null where it is not set."""
        return metas_frame([flat_meta(text) for text in self.texts[Name.META]])

    @cached_property
    def procs(self) -> pl.DataFrame:
        """One row a process: proc, run, rank, world, program."""
        return pl.DataFrame(
            {
                "proc": pl.Series(range(len(self.processes)), dtype=pl.UInt16),
                "run": pl.Series([p.run for p in self.processes], dtype=pl.UInt16),
                "rank": pl.Series([p.rank for p in self.processes], dtype=pl.Int32),
                "world": pl.Series([p.world for p in self.processes], dtype=pl.Int32),
                "program": pl.Series([p.program for p in self.processes], dtype=pl.String),
            }
        )

    @cached_property
    def families(self) -> pl.DataFrame:
        """What kind of program each process runs: proc, family.

        A family is the classes of the modules that own its parameters, so that sizes, depths and script names do
        not matter; a process without a model has the name of its program.
        """
        owners = (
            (self.states.select("proc", "var").unique() if self.held is None else self.held)
            .join(self.variables.filter((pl.col("role") == "parameter") & (pl.col("module") != "")), on="var")
            # How many models of one class there are is a size.
            .select("proc", pl.concat_str(pl.col("model").str.replace(r"#\d+$", ""), pl.lit("/"), "module").alias("m"))
            .unique()
            .group_by("proc")
            .agg(pl.col("m").sort().str.join(" ").alias("family"))
        )
        return (
            self.procs.join(owners, on="proc", how="left", maintain_order="left")
            .select("proc", pl.coalesce("family", "program").alias("family"))
        )

    @property
    def programs(self) -> set[str]:
        return {p.program for p in self.processes}

    @cached_property
    def steps(self) -> int:
        """Training steps seen by the process that saw most. A last one without an update is half a step: it does not count."""
        begun = self.contexts["step"].max()
        codes = [code for code, name in enumerate(self.functions) if name in _UPDATES]
        acts = self.calls.filter(pl.col("fn").is_in(codes)).select("ctx").unique()
        done = self.contexts.join(acts, on="ctx", how="semi")["step"].max()
        if not isinstance(begun, int) or begun < 0:
            return 0
        return begun if done == begun - 1 and begun > 0 else begun + 1
