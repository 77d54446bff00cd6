"""What capsules say of a step against what the reference computed from the same state: confirmed, cleared or inconclusive.

Capsules keep gradients and parameters after the step as fingerprint and Euclidean norm. Norms of two tensors differ by no
more than the tensors do, so a norm that is off by more than a tensor's tolerance is a wrong tensor: norms miss what only
turns a tensor, and accuse nobody else. Parameters after the step are held by value where the next step was kept too.

A difference *confirms* only where the reference surely did the job's step: it computed the same loss, or all state is
placed beyond doubt and every value of the data was put in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.invariants.capsule import Capsule, Print
from proctor.invariants.schema import StateFlag
from proctor.oracle.collect.replay.replay_plan import ReplayReport, read_report
from proctor.oracle.merging.locate import take
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.dtypes import storage
from proctor.oracle.numbers.tolerance import Tolerance
from proctor.oracle.replaying.data import is_model_call
from proctor.oracle.replaying.state import Read, State, assemble
from proctor.oracle.store import Recording

Array = npt.NDArray[Any]
Outcome = Literal["confirmed", "cleared", "inconclusive"]

EXIT_CODES: Final[dict[str, int]] = {"cleared": 0, "confirmed": 1, "inconclusive": 3}
LOSS: Final = 1e-6  # relative; norms of one element are its absolute value in float32


class Later(NamedTuple):
    """Capsules of the next step: parameters after this one, by value."""

    capsules: Mapping[int, Capsule]
    read: Read


class Finding(msgspec.Struct, frozen=True):
    """One number or tensor of the job against the reference's.

    Attributes:
        kind: `output`, `loss`, `gradient`, `parameter` (after the step).
        name: of the module or parameter.
        rank: of the job; -1 for all.
        job, reference: norms.
        error: difference of the norms, or norm of the difference where `by_value`.
        tolerance: what rounding may do.
        wrong: error above tolerance.
        powerless: too wide a tolerance to see an error.
        by_value: the tensors themselves were compared.
        note: in what way it is wrong.
    """

    kind: str
    name: str
    rank: int
    job: float
    reference: float
    error: float
    tolerance: float
    wrong: bool
    powerless: bool = False
    by_value: bool = False
    note: str = ""


class Judgement(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        verdict: `confirmed`: the step is not what the reference computes; `cleared`: it is; `inconclusive`.
        reason: one sentence.
        first: the first wrong finding, in the order of a step.
        wrong: all wrong findings.
        compared: findings.
        loss: whether the reference computed the job's loss; `None` where that is not known.
        notes: what a reader should know besides.
    """

    verdict: Outcome
    reason: str
    first: Finding | None = None
    wrong: tuple[Finding, ...] = ()
    compared: int = 0
    loss: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.verdict]

    @classmethod
    def open(cls, reason: str, notes: Sequence[str] = ()) -> Judgement:
        """Nothing can be said."""
        return cls("inconclusive", reason, notes=tuple(notes))


def judge(recording: Recording, capsules: Mapping[int, Capsule], state: State, ranks: Sequence[int], later: Later | None = None) -> Judgement:
    """Hold the job's step against the reference's.

    Args:
        recording: of the reference, doing the step; with noise samples.
        capsules: by rank, all of the job.
        state: where the job's parameters lie.
        ranks: one of each data-parallel replica.
        later: of the next step.
    """
    reference = Reference(recording)
    report = read_report(recording.path / "runs" / "clean")
    notes = [*state.notes, *recording.info.notes]
    unusable = reference.problem("all") or _incomplete(report)
    if unusable:
        return Judgement.open(unusable, notes)
    found = [*_gradients(reference, capsules, state), *_updates(reference, capsules, state, report, later)]
    outputs = _outputs(reference, capsules, ranks)
    loss = _same_loss(reference, capsules, ranks)
    if outputs is not None and outputs.wrong and any(f.wrong for f in found):
        found.insert(0, outputs)  # supports what gradients say; alone it may be a matter of what the model returns
    wrong = tuple(f for f in found if f.wrong)
    notes += reference.notes
    if not wrong:
        return _nothing_wrong(found, loss, outputs, notes)
    doubt = _doubt(state, report, capsules, loss)
    first = wrong[0]
    if doubt:
        return Judgement("inconclusive", f"{_say(first)}, but {doubt}", first, wrong, len(found), loss, tuple(notes))
    basis = "from the same state and data, and with the same loss," if loss else "from the same state and data"
    return Judgement("confirmed", f"{basis} the reference computes another step: {_say(first)}", first, wrong, len(found), loss, tuple(notes))


def _nothing_wrong(found: Sequence[Finding], loss: bool | None, outputs: Finding | None, notes: Sequence[str]) -> Judgement:
    gradients = [f for f in found if f.kind == "gradient"]
    seeing = [f for f in gradients if not f.powerless]
    if not gradients:
        return Judgement.open("the capsules hold no norm of a gradient to compare", notes)
    if 2 * len(seeing) < len(gradients):
        reason = f"of {len(gradients)} gradients only {len(seeing)} have a tolerance in which an error could be seen"
        return Judgement("inconclusive", reason, compared=len(found), loss=loss, notes=tuple(notes))
    what = [f"the norms of {len(gradients)} gradients"]
    updates = [f for f in found if f.kind == "parameter"]
    if updates:
        values = all(f.by_value for f in updates)
        what.append(f"{len(updates)} parameters after it" if values else f"the norms of {len(updates)} parameters after it")
    else:
        notes = (*notes, "the update was not compared: the optimizer's state or options could not be put into the reference")
    what += ["the loss"] if loss else []
    what += ["the outputs"] if outputs is not None and not outputs.wrong else []
    text = ", ".join(what[:-1]) + (" and " if len(what) > 1 else "") + what[-1]
    return Judgement("cleared", f"the step is what the reference computes: {text} agree within rounding", compared=len(found), loss=loss, notes=tuple(notes))


def _incomplete(report: ReplayReport) -> str:
    """Why the reference's step is not the job's."""
    if report.trouble:
        return f"the reference could not be given the job's step: {report.trouble[0]}"
    left = next((f for f in report.fed if f.kind == "model" and f.used < f.total), None)
    if left is not None:
        return f"the reference used {left.used} of the job's {left.total} inputs in its step: let it accumulate as many before it steps"
    return ""


def _doubt(state: State, report: ReplayReport, capsules: Mapping[int, Capsule], loss: bool | None) -> str:
    """Why a difference need not be the job's fault."""
    if loss:
        return ""
    if not all(s.sure for shards in state.shards.values() for s in shards):
        return "how parameters are cut is a guess and the loss does not prove it right: say it in a plan"
    if report.drew:
        return "the reference draws random numbers in its forward pass, and the loss does not prove them to be the job's"
    if any(f.regrouped for f in report.fed):
        return "the job's data were put together in another way, and the loss does not prove it right"
    targets = [f for f in report.fed if f.kind == "loss"]
    inside = any(
        o.content is not None and any(r.content is not None and o.content.same(r.content) for r in roots)
        for c in capsules.values()
        for roots in [[s for b in c.calls if b.what == "backward" for s in b.outputs]]
        for call in c.calls
        if is_model_call(call)
        for o in call.outputs
    )
    if inside or (targets and all(f.used == f.total for f in targets)):
        return ""
    loaded = [f for f in report.fed if f.kind == "batch"]
    if loaded and all(f.used for f in loaded):
        return ""
    return "the loss is not the job's, and its targets are in no capsule"


# -- what is compared ---------------------------------------------------------------------------------------------


def _gradients(reference: Reference, capsules: Mapping[int, Capsule], state: State) -> Iterator[Finding]:
    for key in reference.order:
        if key[0] == 0 and key[2] == "main_grad" and key[4] == "":
            yield from _by_norm(reference, key, "gradient", capsules, state)


def _updates(
    reference: Reference, capsules: Mapping[int, Capsule], state: State, report: ReplayReport, later: Later | None
) -> Iterator[Finding]:
    begun = set(report.updates)
    for key in reference.order:
        if key[0] != 0 or key[2] != "param_after" or key[3] not in begun:
            continue
        found = _by_value(reference, key, state, later) if later is not None else None
        if found is not None:
            yield found
        else:
            yield from _by_norm(reference, key, "parameter", capsules, state)


def _by_norm(reference: Reference, key: Key, kind: str, capsules: Mapping[int, Capsule], state: State) -> Iterator[Finding]:
    """Of each rank's part; parts that are the same are one finding."""
    entry = reference.entries[key]
    values = reference.floats(entry)
    allowed = _allowed(reference, key)
    role = "gradient" if kind == "gradient" else "parameter"
    seen: set[tuple[tuple[bytes, ...], int]] = set()
    for shard in state.shards.get(key[3], []):
        variable = next((v for v in capsules[shard.rank].state if v.role == role and v.name == shard.name), None)
        content = variable.after if variable is not None else None
        if content is None or content.flags & StateFlag.UNHASHED or tuple(len(i) for i in shard.places) != np.shape(take(values, shard.places)):
            continue
        where = (tuple(i.tobytes() for i in shard.places), content.fp)
        if where in seen:
            continue
        seen.add(where)
        yield _norms(kind, key[3], shard.rank, content, take(values, shard.places), allowed)


def _norms(kind: str, name: str, rank: int, content: Print, part: Array, allowed: Tolerance) -> Finding:
    theirs = float(np.linalg.norm(part.astype(np.float64).ravel()))
    if content.flags & StateFlag.NONE:
        gone = theirs > allowed.absolute
        return Finding(kind, name, rank, 0.0, theirs, theirs, allowed.absolute, gone, note="the job has none" if gone else "")
    if content.flags & StateFlag.NONFINITE or content.norm is None:
        bad = bool(content.flags & StateFlag.NONFINITE) and math.isfinite(theirs)
        return Finding(kind, name, rank, math.nan, theirs, math.inf if bad else 0.0, allowed.absolute, bad, not bad, note="it is not finite" if bad else "")
    error = abs(content.norm - theirs)
    wrong = bool(error > allowed.absolute and error > 4 * np.finfo(np.float32).eps * theirs)
    note = f"{content.norm / theirs:.4g} times the reference's" if wrong and theirs else ""
    return Finding(kind, name, rank, content.norm, theirs, error, allowed.absolute, wrong, allowed.powerless, note=note)


def _by_value(reference: Reference, key: Key, state: State, later: Later | None) -> Finding | None:
    """A parameter after the step from the capsules of the next one."""
    entry = reference.entries[key]
    parts = []
    for shard in state.shards.get(key[3], []):
        variable = next((v for v in later.capsules[shard.rank].state if v.role == "parameter" and v.name == shard.name), None) if later else None
        if later is None or variable is None or not variable.key or variable.dtype != entry.dtype:
            return None
        if variable.shape != tuple(len(i) for i in shard.places):
            return None
        parts.append((shard, later.read(shard.rank, variable.key)))
    mine = assemble(entry.shape, storage(entry.dtype), parts) if parts else ""
    if isinstance(mine, str):
        return None
    sums = compare(mine, np.ascontiguousarray(reference.array(entry)), entry.dtype)
    allowed = reference.tolerance(key, sums, "all")
    wrong = sums.error > allowed.absolute or bool(sums.mismatch)
    return Finding("parameter", key[3], -1, math.sqrt(sums.candidate_sq), sums.size, sums.error, allowed.absolute, wrong, allowed.powerless, by_value=True)


def _outputs(reference: Reference, capsules: Mapping[int, Capsule], ranks: Sequence[int]) -> Finding | None:
    """All that the model returned, as one: the calls may be grouped otherwise."""
    keys = [k for k in reference.order if k[0] == 0 and k[2] == "output" and k[3] == ""]
    seen = [s for r in ranks for c in capsules[r].calls if is_model_call(c) for s in c.outputs if s.dtype.startswith(("float", "bfloat"))]
    mine = [s for s in seen if s.content is not None and s.content.norm is not None]
    entries = [reference.entries[k] for k in keys]
    if not mine or len(mine) < len(seen) or sum(math.prod(s.shape) for s in mine) != sum(math.prod(e.shape) for e in entries):
        return None
    theirs = math.sqrt(sum(_self(reference, k).reference_sq for k in keys))
    job = math.sqrt(sum((s.content.norm or 0.0) ** 2 for s in mine if s.content is not None))
    allowed = math.sqrt(sum(_allowed(reference, k).absolute ** 2 for k in keys))
    return Finding("output", "the model", -1, job, theirs, abs(job - theirs), allowed, abs(job - theirs) > allowed)


def _same_loss(reference: Reference, capsules: Mapping[int, Capsule], ranks: Sequence[int]) -> bool | None:
    """Whether the reference's loss is the job's, however their microbatches are averaged."""
    keys = [k for k in reference.order if k[0] == 0 and k[2] == "scalar" and k[3] == "loss"]
    if not keys:
        return None
    per_rank = {r: _losses(capsules[r]) for r in sorted(capsules)}
    have = [r for r in ranks if per_rank[r]]
    if len(have) < len(ranks):  # a pipeline: its last stage has the losses
        different = {tuple(per_rank[r]): r for r in reversed(sorted(capsules)) if per_rank[r]}
        have = sorted(different.values())
    if not have or len({len(per_rank[r]) for r in have}) != 1:
        return None
    theirs = [abs(float(reference.floats(reference.entries[k]).ravel()[0])) for k in keys]
    slack = max(_allowed(reference, k).absolute for k in keys)
    mine = [x for r in have for x in per_rank[r]]
    per_call = len(per_rank[have[0]])
    options = {sum(mine), sum(mine) / len(have), sum(mine) / len(have) / per_call, sum(mine) / per_call}
    others = {sum(theirs), sum(theirs) / len(theirs)}
    return any(abs(a - b) <= max(slack, LOSS * b) for a in options for b in others)


def _losses(capsule: Capsule) -> list[float]:
    return [
        s.content.norm
        for c in capsule.calls
        if c.what == "backward"
        for s in c.outputs
        if math.prod(s.shape) == 1 and s.content is not None and s.content.norm is not None
    ]


def _self(reference: Reference, key: Key) -> Difference:
    entry = reference.entries[key]
    values = np.ascontiguousarray(reference.array(entry))
    return compare(values, values, entry.dtype)


def _allowed(reference: Reference, key: Key) -> Tolerance:
    return reference.tolerance(key, _self(reference, key), "all")


def _say(found: Finding) -> str:
    where = f" on rank {found.rank}" if found.rank >= 0 else ""
    what = f"the {found.kind} of {found.name}" if found.kind != "parameter" else f"{found.name} after the step"
    size = f"off by {found.error:.3g}, where rounding makes up to {found.tolerance:.2g}"
    if found.note[:1].isdigit():
        return f"{what}{where} is {found.note} ({size})"
    return f"{what}{where} differs: {found.note or size}"
