"""Learns rules from runs: propose, collect examples, find preconditions, select (TrainCheck Algorithm 1).

Relations are independent of each other, so one that fails costs its own rules only, and they can run in a process
pool. A rule that any given run contradicts is not learned: a failing example of any run is excluded by the
precondition, or the hypothesis is dropped.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import msgspec
from polars.exceptions import PanicException

from proctor.infer.preconditions import infer_preconditions
from proctor.infer.select import MIN_PASSED, distinct, select
from proctor.invariants.invariant import Hypothesis, Invariant
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Trace

PHASES = ("propose", "examples", "preconditions", "done")
Progress = Callable[[str, str, int], None]
"""Called with a relation, the phase it enters, and how much there is: hypotheses, examples, or rules when done."""


@dataclass(frozen=True)
class Tally:
    """What one relation gave."""

    relation: str
    hypotheses: int = 0
    examples: int = 0
    rules: int = 0
    conditional: int = 0  # rules with a precondition
    dropped: dict[str, int] = field(default_factory=dict)  # hypotheses by reason
    seconds: float = 0.0
    error: str = ""  # the relation failed, in one line

    @property
    def unconditional(self) -> int:
        return self.rules - self.conditional


@dataclass(frozen=True)
class Report:
    """What an inference did, relation by relation."""

    tallies: list[Tally]

    @property
    def rules(self) -> int:
        return sum(t.rules for t in self.tallies)

    @property
    def dropped(self) -> dict[str, int]:
        """Hypotheses by the reason why they did not become rules, most frequent first."""
        total: dict[str, int] = {}
        for tally in self.tallies:
            for why, count in tally.dropped.items():
                total[why] = total.get(why, 0) + count
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    @property
    def errors(self) -> dict[str, str]:
        return {t.relation: t.error for t in self.tallies if t.error}


def infer(
    trace: Trace,
    relations: Sequence[Relation],
    *,
    progress: Progress | None = None,
    min_support: int = MIN_PASSED,
    jobs: int = 1,
    strict: bool = False,
) -> tuple[list[Invariant], Report]:
    """Learn rules that hold in all of a trace.

    Args:
        trace: one or more healthy runs.
        relations: families of rules to look for.
        progress: told when a relation enters a phase.
        min_support: passing examples that a rule, and each alternative of its precondition, needs.
        jobs: relations at a time, each in a process of its own when more than one.
        strict: raise what a relation raises, instead of reporting it.

    Returns:
        rules by relation, in the order of `relations`, and what became of all hypotheses.
    """
    if jobs > 1 and len(relations) > 1:
        learned = list(_in_pool(trace, relations, progress, min_support, min(jobs, len(relations)), strict))
    else:
        learned = [_guarded(trace, relation, progress, min_support, strict) for relation in relations]
    rules = distinct([rule for found, _ in learned for rule in found])
    return rules, Report([tally for _, tally in learned])


Learned = tuple[list[Invariant], Tally]


def _guarded(
    trace: Trace, relation: Relation, progress: Progress | None, min_support: int, strict: bool
) -> Learned:
    """The one place where a relation's own failure is caught: the other relations are worth having."""
    started = time.perf_counter()
    try:
        return _learn(trace, relation, progress, min_support)
    # Anything a relation can raise, also a panic inside polars, which is not an Exception.
    except (Exception, PanicException) as e:
        if strict:
            raise
        if progress:
            progress(relation.name, "done", 0)
        return [], Tally(relation.name, seconds=time.perf_counter() - started, error=_one_line(e))


def _learn(trace: Trace, relation: Relation, progress: Progress | None, min_support: int) -> Learned:
    def enter(phase: str, amount: int) -> None:
        if progress:
            progress(relation.name, phase, amount)

    started = time.perf_counter()
    enter("propose", 0)
    # Sorted by what they say, so that a relation may collect them in a set.
    hypotheses: list[Hypothesis] = sorted(set(relation.propose(trace)), key=msgspec.json.encode)
    if not hypotheses:
        enter("done", 0)
        return [], Tally(relation.name, seconds=time.perf_counter() - started)
    enter("examples", len(hypotheses))
    examples = relation.examples(trace, hypotheses)
    enter("preconditions", examples.frame.height)
    outcomes = infer_preconditions(examples, min_support=min_support, min_clause_support=min_support)
    rules, dropped = select(relation, hypotheses, outcomes, trace.processes, min_passed=min_support)
    enter("done", len(rules))
    return rules, Tally(
        relation=relation.name,
        hypotheses=len(hypotheses),
        examples=examples.frame.height,
        rules=len(rules),
        conditional=sum(not rule.precondition.unconditional for rule in rules),
        dropped=dict(dropped),
        seconds=time.perf_counter() - started,
    )


# -- process pool ------------------------------------------------------------------------------------------------

_worker_trace: list[Trace] = []  # of a pool worker: loaded once, used by every relation that it is given


def _in_pool(
    trace: Trace,
    relations: Sequence[Relation],
    progress: Progress | None,
    min_support: int,
    jobs: int,
    strict: bool,
) -> Iterator[Learned]:
    # `replace` leaves views behind that relations keep with the trace. Spawned, since a fork inherits the locks of polars' threads but not the threads (docs.pola.rs, multiprocessing).
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), _start_worker, (pickle.dumps(replace(trace), protocol=5), threads)
    ) as pool:
        futures = {pool.submit(_in_worker, relation, min_support, strict): relation for relation in relations}
        results: dict[str, Learned] = {}
        for future in as_completed(futures):
            name = futures[future].name
            try:
                results[name] = future.result()
            except Exception as e:
                if strict:
                    raise
                died = isinstance(e, BrokenProcessPool)
                error = (
                    "its worker process died, often for lack of memory: try --jobs 1"
                    if died
                    else _one_line(e)
                )
                results[name] = [], Tally(name, error=error)
            if progress:
                progress(name, "done", len(results[name][0]))
    yield from (results[relation.name] for relation in relations)


def _start_worker(trace: bytes, threads: int) -> None:
    # Before the first use of polars in this process, which is when it reads this; hence bytes and not the trace.
    os.environ["POLARS_MAX_THREADS"] = str(threads)
    _worker_trace[:] = [pickle.loads(trace)]


def _in_worker(relation: Relation, min_support: int, strict: bool) -> Learned:
    return _guarded(_worker_trace[0], relation, None, min_support, strict)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
