"""Learns rules from runs: survey, collect examples, find preconditions, select, cross-validate (TrainCheck Algorithm 1).

Every run is visited by itself, twice: once for what hypotheses it suggests, once for its examples of those of all
runs. Both are merged by associative and commutative operations (`Relation.merge`, `partial.merge`), so it does not
matter where and in what order runs are read. What one run contributes does not depend on the other runs, so inference
sees of a run exactly what checking it would see.

Relations are independent of each other, so one that fails costs its own rules only. A rule that any given run
contradicts is not learned: a failing example of any run is excluded by the precondition, or the hypothesis is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl
from polars.exceptions import PanicException

from proctor.infer import evidence as why_believed
from proctor.infer import shards
from proctor.infer.executors import Executor, Lost, one_line
from proctor.infer.executors.serial import SerialExecutor
from proctor.infer.selection import conclude, redundant
from proctor.infer.selection.select import MIN_PASSED, distinct
from proctor.infer.shards import Shard, Summary, tasks
from proctor.infer.shards.partial import Partial, merge
from proctor.infer.shards.parts import Parts
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Evidence, Hypothesis, Invariant
from proctor.invariants.pack import Refuted
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Trace

STAGES = ("reading runs", "collecting examples", "finding preconditions")
Progress = Callable[[str, int, int], None]
"""Called with a stage, how many of its tasks are done, and how many there are."""
IMPLIED = "implied by another rule"
_MANY = 2_000_000  # rows of partials that wait to be merged


@dataclass(frozen=True)
class Tally:
    """What one relation gave."""

    relation: str
    hypotheses: int = 0
    examples: int = 0
    rules: int = 0
    conditional: int = 0  # rules with a precondition
    dropped: dict[str, int] = field(default_factory=dict)  # hypotheses by reason
    seconds: float = 0.0  # of all workers together
    error: str = ""  # the relation failed, in one line

    @property
    def unconditional(self) -> int:
        return self.rules - self.conditional


@dataclass(frozen=True)
class Report:
    """What an inference read, and what it did relation by relation.

    reused: results of an earlier inference that were still valid.
    refuted: hypotheses that the runs contradict.
    """

    tallies: list[Tally]
    runs: list[Summary] = field(default_factory=list)
    reused: int = 0
    refuted: tuple[Refuted, ...] = ()

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


@dataclass(frozen=True)
class Options:
    """How to infer.

    min_support: passing examples that a rule, and each alternative of its precondition, needs.
    held_bytes: of runs that a worker may keep in memory between their two visits.
    validate: measure rules on held-out runs, and drop those that fail there too often.
    strict: raise what a relation raises, instead of reporting it.
    parts: where finished tasks are kept, for another inference to use.
    prior: rules that other programs have taught, by `hypothesis_id`, and where they apply. Of these one example is enough,
        if nothing speaks against them: a law is one in a run of two steps, too.
    """

    min_support: int = MIN_PASSED
    held_bytes: int = shards.HELD_BYTES
    validate: bool = True
    strict: bool = False
    parts: Parts | None = None
    prior: Mapping[str, Precondition] = field(default_factory=dict)


def infer(
    source: Trace | Sequence[Shard],
    relations: Sequence[Relation],
    *,
    options: Options | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
    jobs: int = 1,
    strict: bool = False,
) -> tuple[list[Invariant], Report]:
    """Learn rules that hold in all of some runs.

    Args:
        source: healthy runs, in memory or as shards.
        relations: families of rules to look for.
        options: how.
        progress: told when a task of a stage is done.
        executor: where tasks run; closed by its owner.
        jobs: processes on this machine to work with, when there is no executor.
        strict: as in the options, which it overrides.

    Returns:
        rules by relation, in the order of `relations`, and what became of all hypotheses.

    Raises:
        TraceError: a run cannot be read.
    """
    chosen = options or Options(strict=strict)
    pieces = shards.of_trace(source) if isinstance(source, Trace) else list(source)
    mine = executor if executor is not None else _local(jobs)
    try:
        return _Inference(pieces, relations, chosen, progress, mine).run()
    finally:
        if executor is None:
            mine.close()
        shards.forget()


def _local(jobs: int) -> Executor:
    if jobs == 1:
        return SerialExecutor()
    from proctor.infer.executors.pool import PoolExecutor

    return PoolExecutor(jobs)


class _Inference:
    """One inference: what is known of each relation so far."""

    def __init__(
        self,
        pieces: Sequence[Shard],
        relations: Sequence[Relation],
        options: Options,
        progress: Progress | None,
        executor: Executor,
    ) -> None:
        self.pieces, self.options, self.progress, self.executor = pieces, options, progress, executor
        self.relations = {r.name: r for r in relations}
        # Sorted, so that the folds of cross-validation do not depend on the order in which runs are given.
        self.run_of = {name: i for i, name in enumerate(sorted({run for p in pieces for run in p.runs}))}
        self.summaries: dict[int, Summary] = {}
        self.errors: dict[str, str] = {}
        self.seconds = dict.fromkeys(self.relations, 0.0)
        self.reused = 0

    def run(self) -> tuple[list[Invariant], Report]:
        hypotheses = self._survey()
        partials, evidence = self._collect(hypotheses)
        concluded = self._conclude(hypotheses, partials, evidence)
        order = list(self.relations)
        rules = distinct([rule for name in order if name in concluded for rule in concluded[name].rules])
        rules, implied = redundant.without_implied(rules, self.relations)
        gone = Counter(rule.relation for name in concluded for rule in concluded[name].rules)
        gone.subtract(rule.relation for rule in rules)
        tallies = []
        for name in order:
            done = concluded.get(name)
            kept = [rule for rule in rules if rule.relation == name]
            dropped = dict(done.dropped) if done is not None else {}
            if implied and gone[name] > 0:
                dropped[IMPLIED] = gone[name]
            tallies.append(
                Tally(
                    relation=name,
                    hypotheses=len(hypotheses.get(name, ())),
                    examples=partials[name].examples if name in partials else 0,
                    rules=len(kept),
                    conditional=sum(not rule.precondition.unconditional for rule in kept),
                    dropped=dropped,
                    seconds=self.seconds[name],
                    error=self.errors.get(name, ""),
                )
            )
        refuted = sorted({r for done in concluded.values() for r in done.refuted})
        return rules, Report(tallies, self._runs(), self.reused, tuple(refuted))

    def _runs(self) -> list[Summary]:
        return [self.summaries[i] for i in sorted(self.summaries)]

    # -- stages --------------------------------------------------------------------------------------------------

    def _survey(self) -> dict[str, tuple[Hypothesis, ...]]:
        """Hypotheses by relation, sorted by what they say, so that a relation may collect them in a set."""
        surveys: dict[str, list[pl.DataFrame]] = {name: [] for name in self.relations}
        every = tuple(self.relations.values())
        for i, done in self._each(STAGES[0], tasks.survey, [tasks.Survey(self._work(p), every) for p in self.pieces]):
            for summary in done.summaries:
                run = self.run_of[summary.run]
                held = self.summaries.get(run) if self.pieces[i].window is not None else None
                self.summaries[run] = summary if held is None else held.plus(summary)
            for name, survey in done.surveys.items():
                surveys[name].append(survey)
        found: dict[str, tuple[Hypothesis, ...]] = {}
        for name, relation in self.relations.items():
            try:
                if name not in self.errors:
                    settled = relation.settle(relation.merge(surveys[name]))
                    found[name] = tuple(sorted(set(settled), key=msgspec.json.encode))
            except (Exception, PanicException) as e:  # noqa: BLE001  a relation's own failure
                self._fail(name, e)
        return found

    def _collect(
        self, hypotheses: Mapping[str, tuple[Hypothesis, ...]]
    ) -> tuple[dict[str, Partial], dict[str, dict[int, Evidence]]]:
        asked = tuple(r for name, r in self.relations.items() if hypotheses.get(name))
        waiting: dict[str, list[Partial]] = {r.name: [] for r in asked}
        shown: dict[str, dict[int, Evidence]] = {r.name: {} for r in asked}
        known = {r.name: hypotheses[r.name] for r in asked}
        wanted = [tasks.Collect(self._work(p), asked, known) for p in self.pieces] if asked else []
        for _, done in self._each(STAGES[1], tasks.collect, wanted):
            for name, counted in done.partials.items():
                waiting[name].append(counted)
                if sum(p.frame.height for p in waiting[name]) > _MANY:
                    waiting[name] = [merge(waiting[name])]
            for name, found in done.evidence.items():
                mine = shown[name]
                for hyp, more in found.items():
                    mine[hyp] = why_believed.join_parts(mine[hyp], more) if hyp in mine else more
        return {name: merge(parts) for name, parts in waiting.items() if name not in self.errors}, shown

    def _conclude(
        self,
        hypotheses: Mapping[str, tuple[Hypothesis, ...]],
        partials: Mapping[str, Partial],
        evidence: Mapping[str, dict[int, Evidence]],
    ) -> dict[str, conclude.Concluded]:
        runs = tuple(self._runs())
        how = (self.options.min_support, self.options.validate, self.options.strict, self.options.prior)
        wanted = [
            conclude.Conclude(self.relations[name], hypotheses[name], partial, evidence[name], runs, *how)
            for name, partial in partials.items()
        ]
        concluded: dict[str, conclude.Concluded] = {}
        # Small next to reading, so that sending partials to workers would cost more than it saves.
        for i, task in enumerate(wanted):
            self._told(STAGES[2], i, len(wanted))
            done = conclude.conclude(task)
            self._spent({done.relation: done.seconds})
            if done.error:
                self.errors[done.relation] = done.error
            else:
                concluded[done.relation] = done
        self._told(STAGES[2], len(wanted), len(wanted))
        return concluded

    # -- tasks ---------------------------------------------------------------------------------------------------

    def _work(self, piece: Shard) -> tasks.Work:
        o = self.options
        return tasks.Work(piece, tuple(self.run_of[run] for run in piece.runs), o.strict, o.held_bytes, o.parts)

    def _each(self, stage: str, act: Callable[[Any], Any], wanted: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Results of tasks as they finish. One that a worker did not survive is done again relation by relation."""
        self._told(stage, 0, len(wanted))
        keys = [task.work.shard.key for task in wanted]
        for done, (i, result) in enumerate(self.executor.map(act, wanted, keys), start=1):
            results: list[Any] = [result]
            if isinstance(result, Lost):
                alone = wanted[i].split()
                results = []
                for j, again in self.executor.map(act, alone, [wanted[i].work.shard.key] * len(alone)):
                    if isinstance(again, Lost):
                        self.errors[alone[j].relations[0].name] = again.why + (": try --jobs 1" if again.died else "")
                    else:
                        results.append(again)
            for one in results:
                self.errors.update(one.errors)
                self._spent(one.seconds)
                self.reused += one.reused
                yield i, one
            self._told(stage, done, len(wanted))

    def _spent(self, seconds: Mapping[str, float]) -> None:
        for name, more in seconds.items():
            self.seconds[name] += more

    def _fail(self, name: str, error: BaseException) -> None:
        if self.options.strict:
            raise error
        self.errors[name] = one_line(error)

    def _told(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)
