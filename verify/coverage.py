"""What a trace could not show: missing ranks, lost records, processes that were cut off.

Absence of a record is evidence only where every record was kept. Everything here turns "it did not happen" into
"unknown" where that does not hold; it never turns anything into a violation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import polars as pl

from proctor.invariants.blindness import hides, words
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Relation
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace
from proctor.verify.wording import count, ranges

_MAX_CUT = 5  # functions named that lost details
_MAX_LISTED = 4096  # missing ranks listed per run


@dataclass(frozen=True)
class Coverage:
    """Which parts of a trace can be judged.

    missing: per run, ranks of its world that left no record (bounded list).
    dropped: processes that lost records.
    horizon: for a process that never said goodbye, the step from which records may be missing.
    unobserved: for a process, functions that may have been called without a record.
    damaged: for a run, the step from which the files of one of its processes lack records that were there.
    dark: of a run, what an error of ours ended (`invariants.blindness`), and in which step.
    cut: of a run and a function, features that its signatures do not tell from a step on (`signature.left_out`).
    """

    missing: dict[int, list[int]]
    dropped: frozenset[int]
    horizon: dict[int, int]
    notes: list[str]
    unobserved: Mapping[int, frozenset[str]] = field(default_factory=dict)
    damaged: Mapping[int, int] = field(default_factory=dict)
    dark: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    cut: Mapping[tuple[int, str], Mapping[str, int]] = field(default_factory=dict)

    def unsure(self, frame: pl.DataFrame, runs: list[int]) -> pl.DataFrame:
        """Nothing is said of a run from where the files of a process are damaged.

        Args:
            frame: examples; `proc`, `step` and `passed` are used.
            runs: run of every process.
        """
        edges = {p: self.damaged[run] for p, run in enumerate(runs) if run in self.damaged}
        if not edges:
            return frame
        edge = pl.col("proc").replace_strict(list(edges), list(edges.values()), default=None, return_dtype=pl.Int32)
        hidden = (pl.col("step").fill_null(1 << 30) >= edge).fill_null(value=False)
        return frame.with_columns(pl.when(hidden).then(pl.lit(None, dtype=pl.Boolean)).otherwise(pl.col("passed")).alias("passed"))

    @property
    def complete(self) -> bool:
        """Every rank of every run left records, they are there, and nothing of ours failed."""
        return not self.missing and not self.damaged and not self.dark

    def ends(self, relation: Relation, hypothesis: Hypothesis) -> dict[int, int]:
        """By run, the step from which what a rule needs is not recorded; empty where all of it is."""
        found: list[tuple[int, int]] = []
        if self.dark:
            needs = relation.needs(hypothesis)
            found += [(run, s) for run, ended in self.dark.items() for what, s in ended.items() if hides(what, needs)]
        if self.cut:
            wanted = relation.details(hypothesis)
            for (run, function), features in self.cut.items():
                asked = [f for name, f in wanted if name == function or (name == MODEL_CALL and function.endswith(".forward"))]
                found += [(run, s) for f, s in features.items() if any(_covers(f, feature) for feature in asked)]
        return {run: min(s for r, s in found if r == run) for run in {r for r, _ in found}}

    def darken(self, frame: pl.DataFrame, ends: Mapping[int, Mapping[int, int]], runs: Sequence[int]) -> pl.DataFrame:
        """Examples from where records end become unknown; a failure just before may come of it, too.

        Args:
            frame: examples; `hyp`, `proc`, `step` and `passed` are used.
            ends: `ends` of the hypotheses that have any, by number.
            runs: run of every process.
        """
        edges = pl.DataFrame(
            [(hyp, proc, step) for hyp, by_run in ends.items() for proc, run in enumerate(runs) if (step := by_run.get(run)) is not None],
            schema={"hyp": pl.UInt32, "proc": pl.UInt16, "_edge": pl.Int32},
            orient="row",
        )
        frame = frame.join(edges, on=["hyp", "proc"], how="left", maintain_order="left")
        failed = pl.col("passed").eq_missing(pl.lit(value=False))
        at = pl.col("step").fill_null(1 << 30)
        unsure = ((at >= pl.col("_edge")) | (failed & (at >= pl.col("_edge") - 1))).fill_null(value=False)
        passed = pl.when(unsure).then(pl.lit(None, dtype=pl.Boolean)).otherwise(pl.col("passed"))
        return frame.with_columns(passed.alias("passed")).drop("_edge")

    def doubt(
        self, frame: pl.DataFrame, *, across_ranks: bool, runs: list[int], hypotheses: Sequence[Hypothesis] = ()
    ) -> pl.DataFrame:
        """Failures of a relation about absence become unknown where records may be missing.

        Args:
            frame: examples; `proc`, `step` and `passed` are used.
            across_ranks: one example speaks of several ranks, so a loss on any rank of its run counts.
            runs: run of every process.
            hypotheses: those that `hyp` of the examples counts.
        """
        lossy = set(self.dropped)
        if across_ranks:
            hit = {runs[p] for p in self.dropped} | set(self.missing)
            lossy |= {p for p, run in enumerate(runs) if run in hit}
        doubtful = pl.lit(value=False)
        if lossy:
            doubtful = doubtful | pl.col("proc").is_in(sorted(lossy))
        if self.horizon:
            horizon = dict(self.horizon)
            if across_ranks:
                for run in set(runs):
                    cut = [s for p, s in self.horizon.items() if runs[p] == run]
                    horizon |= {p: min(cut) for p, r in enumerate(runs) if r == run and cut}
            edge = pl.col("proc").replace_strict(
                list(horizon), list(horizon.values()), default=None, return_dtype=pl.Int32
            )
            doubtful = doubtful | (pl.col("step") >= edge).fill_null(value=False)
        for proc, functions in self.unobserved.items():
            blind = [i for i, h in enumerate(hypotheses) if any(v in functions for _, v in h.params if isinstance(v, str))]
            if blind:
                doubtful = doubtful | (pl.col("hyp").is_in(blind) & (pl.col("proc") == proc))
        failed = pl.col("passed").eq_missing(pl.lit(value=False))
        return frame.with_columns(
            pl.when(failed & doubtful).then(pl.lit(None, dtype=pl.Boolean)).otherwise(pl.col("passed")).alias("passed")
        )


def coverage(trace: Trace, end: int | None = None) -> Coverage:
    """Judge what the trace can and cannot show.

    Args:
        end: of a run that goes on: the first step that is not over, in all processes.
    """
    missing: dict[int, list[int]] = {}
    notes = list(trace.notes)
    for run, name in enumerate(trace.runs):
        members = [p for p in trace.processes if p.run == run]
        if not members:
            continue
        world = max(p.world for p in members)
        present = {p.rank for p in members}
        absent = list(islice((r for r in range(world) if r not in present), _MAX_LISTED))
        if absent:
            missing[run] = absent
            where = f" in {name}" if len(trace.runs) > 1 else ""
            noun = "rank" if len(absent) == 1 else "ranks"
            notes.append(f"{noun} {ranges(absent)} of {world}{where} left no record; rules across ranks are incomplete")
    dropped = frozenset(i for i, p in enumerate(trace.processes) if p.dropped > 0)
    for i in sorted(dropped):
        p = trace.processes[i]
        notes.append(
            f"rank {p.rank} lost {count(p.dropped, 'record')}; that something did not happen there is unknown, not a violation"
        )
    horizon = _horizon(trace) if end is None else dict.fromkeys(range(len(trace.processes)), end)
    if horizon and end is None:
        cut = ranges(trace.processes[i].rank for i in horizon)
        notes.append(
            f"rank {cut} did not finish (killed, or still running); that something did not happen "
            f"from step {min(horizon.values())} on is unknown"
        )
    if thinned := [p for p in trace.processes if p.left_out > 0]:
        least = max(thinned, key=lambda p: p.left_out / max(p.steps, 1))
        notes.append(f"{least.left_out:,} of {least.steps:,} steps were left out (a budget, --every, or a full disk): what happened in them is unknown")
    unobserved = {i: frozenset(p.unobserved) for i, p in enumerate(trace.processes) if p.unobserved}
    damaged: dict[int, int] = {}
    for process in trace.processes:
        if process.damaged is not None:
            damaged[process.run] = min(process.damaged, damaged.get(process.run, process.damaged))
            since = f"step {process.damaged}" if process.damaged >= 0 else "the beginning"
            notes.append(f"the files of rank {process.rank} are damaged: nothing is known of the run from {since} on")
    dark = _dark(trace)
    for ended in dark.values():
        for what, step in ended.items():
            since = f"step {step}" if step >= 0 else "the beginning"
            notes.append(f"an error of Proctor's ended the recording of {words(what)} in {since}: rules that need it are unknown from there")
    left_out = _cut(trace)
    told = [f"{name} ({_what(features)} from step {min(features.values())})" for (_, name), features in sorted(left_out.items())]
    if told:
        shown = ", ".join(told[:_MAX_CUT]) + (f" and {len(told) - _MAX_CUT} more" if len(told) > _MAX_CUT else "")
        notes.append(f"with too many different calls details are not recorded: {shown}; rules on these are unknown from there")
    return Coverage(missing, dropped, horizon, notes, unobserved, damaged, dark, left_out)


def _dark(trace: Trace) -> dict[int, dict[str, int]]:
    """By run, what an error of ours ended on any of its ranks, and the first step of that."""
    dark: dict[int, dict[str, int]] = {}
    for process in trace.processes:
        for what, step in process.blind:
            ended = dark.setdefault(process.run, {})
            ended[what] = min(step, ended.get(what, step))
    return dark


def _cut(trace: Trace) -> dict[tuple[int, str], dict[str, int]]:
    """By run and function, features that some call had and its signature does not tell, and the first step of that."""
    missing = trace.left_out
    if not missing:
        return {}
    codes = pl.DataFrame(
        [(code, feature) for code, features in missing.items() for feature in features],
        schema={"code": pl.UInt32, "feature": pl.String},
        orient="row",
    )
    calls = trace.calls.select("proc", "fn", "ctx", "args", "ret").filter(
        pl.col("args").is_in(codes["code"].implode()) | pl.col("ret").is_in(codes["code"].implode())
    )
    if calls.is_empty():
        return {}
    sides = [calls.select("proc", "fn", "ctx", pl.col(side).alias("code"), pl.lit(side).alias("side")) for side in ("args", "ret")]
    rows = pl.concat(sides).join(codes, on="code").join(trace.contexts.select("ctx", "step"), on="ctx")
    found: dict[tuple[int, str], dict[str, int]] = {}
    for proc, fn, side, feature, step in rows.group_by("proc", "fn", "side", "feature").agg(pl.col("step").min()).iter_rows():
        features = found.setdefault((trace.processes[proc].run, trace.functions[fn]), {})
        name = feature or ("out" if side == "ret" else "")
        features[name] = min(step, features.get(name, step))
    return found


def _covers(missing: str, feature: str) -> bool:
    """Whether a rule on this feature misses what is left out: `0.shape` is wanted by `0.shape[1]` and `0.ndim`."""
    if feature == "" or missing == feature:
        return True
    if missing == "":
        return not feature.startswith("out")
    if missing == "out":
        return feature.startswith("out")
    path, _, attribute = missing.rpartition(".")
    return attribute == "shape" and (feature.startswith(f"{missing}[") or feature == f"{path}.ndim")


def _what(features: Collection[str]) -> str:
    if any(not f or f == "out" for f in features):
        return "everything"
    return "sizes" if all(f.endswith(".shape") for f in features) else "numbers"


def _horizon(trace: Trace) -> dict[int, int]:
    """Last step that each unfinished process recorded whole tables for: tables are cut independently."""
    unfinished = [i for i, p in enumerate(trace.processes) if not p.finished]
    horizon: dict[int, int] = {}
    if not unfinished:
        return horizon
    steps = trace.contexts.select("ctx", "step")
    for table in (trace.calls, trace.states):
        last = (
            table.select("proc", "ctx")
            .unique()
            .filter(pl.col("proc").is_in(unfinished))
            .join(steps, on="ctx", how="inner")
            .group_by("proc")
            .agg(pl.col("step").max())
        )
        for proc, step in last.drop_nulls().iter_rows():
            horizon[proc] = min(step, horizon.get(proc, step))
    return horizon
