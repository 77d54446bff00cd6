"""Forwards without gradients between training steps: are they the reference's as well?

They are compared as training is, apart from it: the forwards of one step on both sides, counted by themselves, with tolerances from
the same noise runs. What only one side evaluates is listed. Where nothing in training differs, the culprit is the first module of an
evaluation that gives something else although it got the right thing: nothing flows back, so the dataflow alone tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from proctor.oracle.judging.blame import around
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.choices import undecided
from proctor.oracle.judging.statistics import Statistics
from proctor.oracle.judging.verdicts import Culprit, ReplicaConflict, TensorVerdict, Verdict, failing, flow
from proctor.oracle.merging.align import count_calls
from proctor.oracle.merging.decoding import View, cut, groups, joined
from proctor.oracle.phases.logprobs import log_probabilities
from proctor.oracle.store import RankRecord, Recording
from proctor.oracle.tensors import EVALUATION, FORWARD, Entry

if TYPE_CHECKING:
    from proctor.oracle.numbers.tolerance import Mode
    from proctor.oracle.plans.plan import Plan


class Judged(NamedTuple):
    """What is said of evaluations, beside what is said of training."""

    tensors: list[TensorVerdict]
    replicas: list[ReplicaConflict]
    unchecked: list[str]
    notes: list[str]


class Evaluated(Recording):
    """A recording as if the evaluation of one of its steps were all that it did.

    Args:
        recording: of a run that evaluates.
        step: after which, from 0; it is step 0 here.
    """

    def __init__(self, recording: Recording, step: int) -> None:
        self.path, self.info = recording.path, msgspec.structs.replace(recording.info, steps=1, whole=[])
        self.step, self._recording = step, recording
        self.seen: Callable[[View], View] = lambda view: view  # what is made of the record of a rank

    def ranks(self, run: str = "clean") -> dict[int, RankRecord]:
        """As of `Recording`."""
        return {rank: self.seen(_view(record, self.step)) for rank, record in self._recording.ranks(run).items()}


class Evaluation(Comparison):
    """The evaluation of one step of a candidate against the reference's."""

    def __init__(self, reference: Evaluated, candidate: Evaluated, plan: Plan | None, mode: Mode, run: str) -> None:
        super().__init__(reference, candidate, plan, mode, run=run)
        self.reference.calls = _totals(self.reference.ranks.values(), lambda entry: entry.name)

    def _start(self) -> Verdict | None:
        return None  # who compares training, or the weights, has seen to that

    def _count(self, record: RankRecord, naming: Callable[[Entry], str]) -> dict[str, int]:
        return _totals([record], naming)

    def judge(self) -> Judged:
        """Compare all of it."""
        said = self.prepare()
        if said is not None:
            return Judged([], [], [said.reason], [])
        tensors: list[TensorVerdict] = []
        replicas: list[ReplicaConflict] = []
        statistics = Statistics(self.reference, self.assembler)
        for key in self.reference.order:
            if key[2] not in ("param", "logprob"):
                verdict, conflicts = self._tensors.judge(key)
                tensors += [statistics.judge(key, verdict)] if verdict is not None else []
                replicas += conflicts
        tensors += [*self.choices.judge(), *self._dropouts().judge()]
        self._not_seen(tensors)
        unchecked = [*self.unchecked, *self.choices.unchecked, *self._tensors.unchecked]
        if why := undecided(self.choices.parted, [t for t in tensors if failing(t)]):
            return Judged([t for t in tensors if not failing(t)], [], [*unchecked, why], [])
        scored, notes = log_probabilities(self)
        return Judged([*tensors, *scored], replicas, unchecked, notes)


def judge_evaluations(whole: Comparison) -> Judged:
    """Compare the evaluations that both sides made.

    Args:
        whole: the comparison of training, of the runs that are trusted and judged; any other has none.
    """
    reference, candidate, run = whole.reference.recording, whole.candidate, whole.run_name
    found = Judged([], [], [], [])
    phase = FORWARD if reference.info.forward else EVALUATION
    if whole.alone or whole.reference.run != reference.trusted:
        return found
    theirs, mine = (_steps(side.ranks(name)) for side, name in ((reference, reference.trusted), (candidate, run)))
    for step in sorted(theirs.keys() | mine.keys()):
        where = f"{phase} of step {step}"
        if step not in theirs or step not in mine:
            found.unchecked.append(f"{where}: only the {'reference' if step in theirs else 'candidate'} runs forwards without gradients")
            continue
        one = Evaluation(*_alike(Evaluated(reference, step), Evaluated(candidate, step), run), whole.plan, whole.mode, run).judge()
        found.notes.extend(f"{where}: {text}" for text in one.notes)
        found.tensors.extend(msgspec.structs.replace(t, step=step, phase=phase) for t in one.tensors)
        found.replicas.extend(msgspec.structs.replace(r, step=step, phase=phase) for r in one.replicas)
        found.unchecked.extend(f"{where}: {text}" for text in one.unchecked)
        for side, counted in (("reference", theirs[step]), ("candidate", mine[step])):
            if counted[0] < counted[1]:
                found.unchecked.append(f"{where}: {counted[1] - counted[0]:,} of {counted[1]:,} forwards of the {side} (--evaluations N records more)")
    return found


def _alike(reference: Evaluated, candidate: Evaluated, run: str) -> tuple[Evaluated, Evaluated]:
    """Both sides with the same forwards, where the candidate reads token by token what the reference reads at once."""
    trainer = next(iter(reference.ranks(reference.trusted).values()))
    engine = next(iter(candidate.ranks(run).values()))
    together = groups(trainer, engine)
    if together:
        _, positions = joined(engine, together)
        candidate.seen = lambda view: joined(view, together)[0]
        reference.seen = lambda view: cut(view, together, positions)
    return reference, candidate


def culprit_of(verdict: Verdict) -> Culprit | None:
    """Which module is wrong where only evaluations are; `None` where training is wrong as well, or where no evaluation is."""
    wrong = [t for t in verdict.tensors if failing(t)]
    if not all(t.phase for t in wrong) or not all(r.phase for r in verdict.replicas):
        return None
    first = min(wrong, key=flow, default=None)
    alone = "" if any(t.phase == FORWARD for t in verdict.tensors) else "in evaluation, training being right, "
    if first is not None and first.kind == "weight":
        return Culprit(first.name.rpartition(".")[0], "model", first.source, f"{first.name}: {first.note or 'it is not the weight of the reference'}", first.ratio)
    if first is None:
        apart = min(verdict.replicas, key=flow, default=None)
        if apart is None:
            return None
        return Culprit(apart.name, "forward", apart.source, f"{alone}replicas of what {_named(apart.name)} gives differ: {apart.note}")
    if first.kind == "dropout":
        return Culprit(first.name, "forward", first.source, f"{alone}{_named(first.name)}: {first.note}", first.ratio, decision="dropout")
    how = f": {first.note}" if first.note else ""
    if first.kind == "input":
        return Culprit(around(verdict, first.name), "forward", first.source, f"{alone}what goes into {_named(first.name)} is the first that is something else{how}", first.ratio)
    text = f"{alone}{_named(first.name)} is the first that gives something else{how}"
    return Culprit(first.name, "forward", first.source, text, first.ratio)


def _named(module: str) -> str:
    return module or "the model"


def _view(record: RankRecord, step: int) -> View:
    """One rank's evaluation in a step, as if it were step 0, with the parameters of the beginning, by which names and places are found."""
    begun = [e for e in record.entries if e.kind == "param" and e.step == 0]
    entries = begun + [msgspec.structs.replace(e, step=0, phase="") for e in record.evaluations if e.step == step]
    draws = [msgspec.structs.replace(d, step=0, phase="") for d in record.evaluation_draws if d.step == step]
    counted = {0: record.info.evaluated.get(step, {})}
    return View(record, entries, msgspec.structs.replace(record.info, draws=draws, groups=[], clips=[], evaluated=counted))


def _steps(ranks: Mapping[int, RankRecord]) -> dict[int, tuple[int, int]]:
    """By step how many calls were recorded of the module that was called the most, and how many there were."""
    out: dict[int, tuple[int, int]] = {}
    for record in ranks.values():
        for step in {e.step for e in record.evaluations}:
            entries = [e for e in record.evaluations if e.step == step]
            roots = {e.name for e in entries if e.order == min(x.order for x in entries)}
            kept = max((e.call + 1 for e in entries if e.name in roots), default=0)
            total = max((record.info.evaluated.get(step, {}).get(name, 0) for name in roots), default=0)
            out[step] = max(out.get(step, (0, 0)), (kept, max(kept, total)))
    return out


def _totals(records: Iterable[RankRecord], naming: Callable[[Entry], str]) -> dict[str, int]:
    """How often each module was called, also where not all calls were recorded."""
    out: dict[str, int] = {}
    for record in records:
        for name, count in count_calls(record.entries, naming, 0).items():
            out[name] = max(out.get(name, 0), count)
        for entry in record.entries:
            if entry.kind in ("input", "output"):
                out[naming(entry)] = max(out[naming(entry)], record.info.evaluated.get(0, {}).get(entry.name, 0))
    return out
