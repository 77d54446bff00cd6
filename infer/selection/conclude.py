"""From all examples of a relation to its rules: preconditions, selection, evidence, held-out runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polars.exceptions import PanicException

from proctor.infer import evidence as why_believed
from proctor.infer.executors import one_line
from proctor.infer.preconditions import Outcome, Why, decide
from proctor.infer.preconditions.compress import compress
from proctor.infer.selection import crossval, redundant, support
from proctor.infer.selection.identity import identified
from proctor.infer.selection.select import refuted, select, vetted
from proctor.infer.shards import Summary
from proctor.infer.shards.partial import Partial
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Evidence, FalseAlarm, Hypothesis, Invariant, hypothesis_id
from proctor.invariants.pack import Refuted
from proctor.invariants.private import libraries_of, private_name
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Process

_COINCIDENT = "says what another rule says"
_OF_ONE = "a manner of one program among several"


@dataclass(frozen=True)
class Conclude:
    """What is known of a relation once all shards are read.

    runs: what each run holds, by its number.
    validate: measure rules on held-out runs.
    prior: what other programs have taught, by `hypothesis_id`: `Options.prior`.
    """

    relation: Relation
    hypotheses: tuple[Hypothesis, ...]
    partial: Partial
    evidence: Mapping[int, Evidence]
    runs: tuple[Summary, ...]
    min_support: int
    validate: bool
    strict: bool
    prior: Mapping[str, Precondition] = field(default_factory=dict)


@dataclass
class Concluded:
    relation: str
    rules: list[Invariant] = field(default_factory=list)
    refuted: list[Refuted] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def conclude(task: Conclude) -> Concluded:
    """The rules of one relation."""
    started = time.perf_counter()
    done = Concluded(task.relation.name)
    try:
        _conclude(task, done)
    except (Exception, PanicException) as e:
        if task.strict:
            raise
        done = Concluded(task.relation.name, error=one_line(e))
    done.seconds = time.perf_counter() - started
    return done


def _conclude(task: Conclude, done: Concluded) -> None:
    relation, hypotheses = task.relation, task.hypotheses
    examples = task.partial.to_examples(relation)
    seen = compress(examples)
    least = task.min_support
    outcomes = decide(seen, examples.scope, min_support=1 if task.prior else least, min_clause_support=least)
    if task.prior:
        outcomes = {i: _believed(o, task.prior.get(hypothesis_id(hypotheses[i])), least) for i, o in outcomes.items()}
    done.refuted = refuted(hypotheses, outcomes)
    dropped: Counter[str] = Counter()
    programs = [run.program for run in task.runs]
    measured = crossval.measure(seen, examples.scope, outcomes, programs, min_support=least) if task.validate else {}
    for hyp, (tested, failed) in measured.items():
        if crossval.too_often(tested, failed):
            outcomes.pop(hyp)
            dropped[Why.UNSTABLE] += 1
    unstable = dropped[Why.UNSTABLE]
    ids = [run.sources[0].id if run.sources else run.run for run in task.runs]
    supported = support.by_run(examples, outcomes, ids)
    told = {}
    for hyp, runs in supported.items():
        precondition = outcomes[hyp].precondition
        if precondition is not None:
            shown = why_believed.settle(task.evidence.get(hyp, Evidence()), precondition)
            told[hyp] = Evidence(shown.passing, shown.failing, runs)
    processes = [Process(run=i, rank=0, world=1, pid=0, program=p, folder="") for i, p in enumerate(programs)]
    sources = sorted({source for run in task.runs for source in run.sources})
    rules, refusals = select(
        relation, hypotheses, outcomes, processes, min_passed=1 if task.prior else least, evidence=told, sources=sources
    )
    dropped.update(refusals)
    if unstable:  # selection counted them as never seen
        dropped[Why.NEVER] -= unstable
    libraries = libraries_of({name: versions for run in task.runs for name, versions in run.libraries.items() if versions})
    public = [rule for rule in rules if not private_name(rule.hypothesis, rule.precondition, libraries)]
    if len(public) < len(rules):
        dropped[Why.PRIVATE] += len(rules) - len(public)
    shared = [rule for rule in public if not relation.own or rule.support.programs == len(set(programs))]
    if len(shared) < len(public):
        dropped[_OF_ONE] += len(public) - len(shared)
    rules, gone = redundant.without_coincident(shared, hypotheses, examples)
    if gone:
        dropped[_COINCIDENT] += len(gone)
    rules = identified(rules, dict(zip(ids, task.runs, strict=True)))
    index = {h: i for i, h in enumerate(hypotheses)}
    done.rules = [_vetted(relation, rule, measured.get(index[rule.hypothesis])) for rule in rules]
    done.dropped = {str(why): n for why, n in dropped.items() if n > 0}


def _believed(outcome: Outcome, prior: Precondition | None, least: int) -> Outcome:
    """Of fewer examples than make a rule: where others have taught it and nothing here speaks against it, it applies where they say."""
    if outcome.passed >= least or outcome.why is Why.NEVER:
        return outcome
    if prior is not None and outcome.precondition is not None and not outcome.excluded:
        return replace(outcome, precondition=prior)
    return Outcome(None, Why.RARE, outcome.passed, outcome.excluded)


def _vetted(relation: Relation, rule: Invariant, measured: tuple[int, int] | None) -> Invariant:
    return vetted(relation, rule, FalseAlarm.of(*measured)) if measured is not None and measured[0] else rule
