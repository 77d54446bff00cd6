"""What a worker does with one shard: say what hypotheses it suggests, or collect its examples of those of all shards.

Functions here are called in other processes and on other machines; tasks and results are plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial as bound
from typing import TypeVar

import polars as pl
from polars.exceptions import PanicException

from proctor.infer import shards
from proctor.infer.evidence import collect as collect_evidence
from proctor.infer.executors import one_line
from proctor.infer.shards import Shard, Summary, partial
from proctor.infer.shards.partial import Partial
from proctor.infer.shards.parts import Parts
from proctor.invariants.invariant import Evidence, Hypothesis
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Trace

_T = TypeVar("_T")


@dataclass(frozen=True)
class Work:
    """What tasks have in common.

    shard: what to read.
    runs: numbers of its runs.
    strict: raise what a relation raises, instead of reporting it.
    held_bytes: of traces that the worker may keep for its next visit.
    parts: where finished work is kept.
    """

    shard: Shard
    runs: tuple[int, ...]
    strict: bool
    held_bytes: int
    parts: Parts | None


@dataclass
class Done:
    """What became of a task, by relation.

    reused: results that were taken from an earlier inference.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    reused: int = 0


@dataclass
class Surveyed(Done):
    summaries: list[Summary] = field(default_factory=list)
    surveys: dict[str, pl.DataFrame] = field(default_factory=dict)


@dataclass
class Collected(Done):
    partials: dict[str, Partial] = field(default_factory=dict)
    evidence: dict[str, dict[int, Evidence]] = field(default_factory=dict)


@dataclass(frozen=True)
class Survey:
    """Which hypotheses does a shard suggest?"""

    work: Work
    relations: tuple[Relation, ...]

    def split(self) -> list[Survey]:
        return [Survey(self.work, (r,)) for r in self.relations]


@dataclass(frozen=True)
class Collect:
    """Which examples of these hypotheses does a shard have?"""

    work: Work
    relations: tuple[Relation, ...]
    hypotheses: dict[str, tuple[Hypothesis, ...]]

    def split(self) -> list[Collect]:
        return [Collect(self.work, (r,), {r.name: self.hypotheses[r.name]}) for r in self.relations]


def survey(task: Survey) -> Surveyed:
    """Raises `TraceError` when the run cannot be read."""
    work, done = task.work, Surveyed()
    if work.parts is not None:
        done.summaries = work.parts.summaries(work.shard) or []
    left = []
    for relation in task.relations:
        held = work.parts.survey(work.shard, relation) if work.parts is not None else None
        if held is None:
            left.append(relation)
        else:
            done.surveys[relation.name] = held
            done.reused += 1
    if not left and done.summaries:
        return done
    trace = _open(work)
    if not done.summaries:
        done.summaries = shards.summarize(work.shard, trace)
        if work.parts is not None:
            work.parts.keep_summaries(work.shard, done.summaries)
    for relation in left:
        found = _timed(done, work, relation, bound(_survey, relation, trace))
        if found is not None:
            done.surveys[relation.name] = found
            if work.parts is not None:
                work.parts.keep_survey(work.shard, relation, found)
    return done


def collect(task: Collect) -> Collected:
    """Raises `TraceError` when the run cannot be read."""
    work, done = task.work, Collected()
    trace: Trace | None = None
    for relation in task.relations:
        hypotheses = task.hypotheses[relation.name]
        held = work.parts.examples(work.shard, relation, hypotheses) if work.parts is not None else None
        if held is not None:
            counted, shown = held
            done.reused += 1
        else:
            trace = _open(work) if trace is None else trace
            seen = _timed(done, work, relation, bound(_examples, work.shard, trace, relation, hypotheses))
            if seen is None:
                continue
            counted, shown = seen
            if work.parts is not None:
                work.parts.keep_examples(work.shard, relation, hypotheses, counted, shown)
        done.partials[relation.name] = counted.of_runs(work.runs)
        done.evidence[relation.name] = shown
    return done


def _survey(relation: Relation, trace: Trace) -> pl.DataFrame:
    return relation.merge([relation.survey(trace)])


def _examples(
    shard: Shard, trace: Trace, relation: Relation, hypotheses: tuple[Hypothesis, ...]
) -> tuple[Partial, dict[int, Evidence]]:
    examples = relation.examples(trace, hypotheses)
    if shard.window is not None:
        examples = replace(examples, frame=examples.frame.filter(shard.window.core(pl.col("step"))))
    return partial.count(examples, trace), collect_evidence(relation, trace, hypotheses, None, examples)


def _open(work: Work) -> Trace:
    return shards.open_shard(work.shard, work.held_bytes)


def _timed(done: Done, work: Work, relation: Relation, act: Callable[[], _T]) -> _T | None:
    """The one place where a relation's own failure is caught: the other relations are worth having."""
    started = time.perf_counter()
    try:
        return act()
    # Anything a relation can raise, also a panic inside polars, which is not an Exception.
    except (Exception, PanicException) as e:
        if work.strict:
            raise
        done.errors[relation.name] = one_line(e)
        return None
    finally:
        done.seconds[relation.name] = done.seconds.get(relation.name, 0.0) + time.perf_counter() - started
