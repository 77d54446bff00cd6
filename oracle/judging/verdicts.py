"""From differences and tolerances to verdicts: of each tensor, of replicas, and of the whole comparison.

What cannot be seen is never called equal: a tolerance wider than the tensor is `no-power`, and a comparison in which fewer
than half of the tensors could show an error is `inconclusive`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from proctor.oracle.merging.assemble import ACTIVATIONS
from proctor.oracle.numbers.difference import Difference
from proctor.oracle.numbers.explain import explain_difference, nonfinite_note
from proctor.oracle.numbers.slopes import SlopeFlag
from proctor.oracle.numbers.tolerance import WARN, Tolerance

__all__ = [
    "EXIT_CODES",
    "Culprit",
    "ReplicaConflict",
    "TensorVerdict",
    "Verdict",
    "conclude",
    "explain_difference",
    "failing",
    "flow",
    "judge",
    "not_compared",
    "with_slopes",
]

Word = Literal["ok", "warn", "bad", "no-power", "unmapped", "missing", "shape", "nonfinite"]
Outcome = Literal["equivalent", "different", "inconclusive"]

EXIT_CODES: Final[dict[str, int]] = {"equivalent": 0, "different": 1, "inconclusive": 3}
FAILING: Final = frozenset({"bad", "missing", "shape", "nonfinite"})
COMPARED: Final = frozenset({"ok", "warn", "bad", "no-power", "nonfinite"})
ASTRAY: Final = "not on every rank"  # layout of a tensor that some ranks hold as the reference does and others do not, though nobody said that they must

# Phases of a step in the order of its dataflow; a tensor of a later one depends on those of the earlier.
_PHASES: Final = {
    "weight": 0, "logprob": 1, "param": 0, "buffer": 0, "input": 1, "output": 1, "score": 1, "choice": 1, "dropped": 1, "mask": 1, "dropout": 1, "buffer_after": 2, "grad_output": 3, "grad_input": 3, "main_grad": 4, "scalar": 4, "opt_state": 5, "param_after": 6,
}  # fmt: skip


class TensorVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor.

    Attributes:
        step, call, kind, name, slot: which one, as in the record.
        cls, source: class of its module and `file:line` of the forward.
        rel_err: ‖C-R‖/‖R‖ (of integers the share that differs); infinite where R is zero.
        abs_err: ‖C-R‖.
        tolerance: T/‖R‖.
        ratio: error over tolerance.
        verdict: `bad` is wrong, `warn` close to it, `no-power` cannot be told, `unmapped` was not compared.
        ranks: of the candidate that hold it, or those that are wrong where that is known.
        layout: how it lies on the mesh.
        order: place in the dataflow.
        note: in what way it is wrong.
        phase: as of an entry: `evaluation`, or "" of training.
    """

    step: int = 0
    call: int = 0
    kind: str = ""
    name: str = ""
    slot: str = ""
    cls: str = ""
    source: str = ""
    rel_err: float = 0.0
    abs_err: float = 0.0
    tolerance: float = 0.0
    ratio: float = 0.0
    verdict: Word = "ok"
    ranks: tuple[int, ...] = ()
    layout: str = ""
    order: float = 0.0
    note: str = ""
    phase: str = ""


class ReplicaConflict(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same value do not.

    Attributes:
        kind, name: of the tensor.
        axis: mesh axis along which they differ: the one whose collective is missing or wrong.
        ranks: the minority, or all where there is none.
        majority: the others.
        rel_err: largest difference of two of them, relative.
        note: in what way.
        step, call, slot, source, cls, phase, ratio: as of a tensor; `ratio` is infinite where bit equality was expected.
    """

    kind: str
    name: str
    axis: str
    ranks: tuple[int, ...]
    majority: tuple[int, ...] = ()
    rel_err: float = 0.0
    note: str = ""
    step: int = 0
    call: int = 0
    slot: str = ""
    cls: str = ""
    source: str = ""
    ratio: float = math.inf
    order: float = 0.0
    phase: str = ""


class Culprit(msgspec.Struct, frozen=True):
    """What is wrong by itself, found by `localise`.

    Attributes:
        module: its path; "" is the whole model.
        direction: `forward`, `backward`, `gradient` (after the backward pass), `update` (the optimizer) or `model`.
        source: `file:line`.
        text: one sentence.
        ratio: its own error over tolerance.
        operation: inside the module the first one that differs and its `file:line`; "" where none was found.
        decision: what it decides otherwise, a kind of tensor; "" where it computes something else.
    """

    module: str
    direction: str
    source: str
    text: str
    ratio: float = math.inf
    operation: str = ""
    decision: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison.

    Attributes:
        verdict: the answer.
        first: first wrong tensor in the order of the dataflow.
        tensors: all, in that order.
        replicas: replicas that differ.
        unchecked: what could not be compared, one sentence each.
        notes: what a reader should know besides.
        reason: why this verdict, one sentence.
        checked: tensors that were compared.
        culprit: the module that is wrong by itself, where it was looked for.
        steps: that were compared, and that were recorded.
        alike: both runs begin with the same parameters; where they do not, generated ones would (`--generate`).
    """

    verdict: Outcome
    first: TensorVerdict | None = None
    tensors: tuple[TensorVerdict, ...] = ()
    replicas: tuple[ReplicaConflict, ...] = ()
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    checked: int = 0
    culprit: Culprit | None = None
    alike: bool = True
    steps: tuple[int, int] = (0, 0)

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.verdict]


def judge(
    difference: Difference,
    tolerance: Tolerance | None,
    *,
    step: int,
    call: int,
    kind: str,
    name: str,
    slot: str = "",
    cls: str = "",
    source: str = "",
    ranks: Sequence[int] = (),
    layout: str = "",
    order: float = 0.0,
    note: str = "",
) -> TensorVerdict:
    """The verdict of a tensor that was compared.

    Args:
        difference: candidate against reference.
        tolerance: `None` if no run with noise had this tensor; only bit equality tells anything then.
        note: in what way it is wrong, see `explain_difference`.

    The others are those of `TensorVerdict`.
    """
    allowed = tolerance.absolute if tolerance is not None else math.inf
    error = difference.error
    ratio = 0.0 if error == 0 else error / allowed if allowed > 0 else math.inf
    word: Word
    if difference.mismatch:
        word, ratio, note = "nonfinite", math.inf, note or nonfinite_note(difference)
    elif difference.bit_equal:
        word = "ok"
    elif tolerance is None or tolerance.binding == "unstable":
        word, note = "no-power", note or ("no run with noise had it" if tolerance is None else "a run with noise was not finite")
    elif ratio > 1 or math.isnan(ratio):
        word = "bad"
    elif tolerance.powerless and difference.rounded:
        wide = f"the tolerance is {tolerance.relative:.0%} of it" if tolerance.signal > 0 else "the reference is zero"
        word, note = "no-power", note or wide
    else:
        word = "warn" if ratio > WARN else "ok"
    return TensorVerdict(
        step=step,
        call=call,
        kind=kind,
        name=name,
        slot=slot,
        cls=cls,
        source=source,
        rel_err=difference.relative,
        abs_err=error,
        tolerance=tolerance.relative if tolerance is not None else math.inf,
        ratio=ratio,
        verdict=word,
        ranks=tuple(sorted(ranks)),
        layout=layout,
        order=order,
        note=note,
    )


def with_slopes(found: TensorVerdict, flags: Sequence[SlopeFlag], dim: int, parts: int, *, alone: bool = False) -> TensorVerdict:
    """The verdict of a tensor with parts that are scaled by more than noise, however small the error of the whole.

    Args:
        found: by its norm.
        flags: of `slopes.flags`; without any the verdict stays.
        dim, parts: how it was cut.
        alone: the module ran on rewritten inputs; end to end a slope alone is a remark and no proof (`warn`).
    """
    if not flags or failing(found):
        return found
    worst = max(flags, key=lambda f: f.ratio)
    which = ", ".join(str(f.part) for f in flags[:8]) + (", …" if len(flags) > 8 else "")
    note = f"part{'s' if len(flags) > 1 else ''} {which} of {parts} along dim {dim} scaled by {1 + worst.alpha:.4g}, more than noise does"
    return msgspec.structs.replace(
        found,
        verdict="bad" if alone else "warn",
        ratio=worst.ratio if alone else max(found.ratio, min(worst.ratio, 1.0)),
        note=f"{found.note}; {note}" if found.note and found.verdict != "no-power" else note,
    )


def not_compared(word: Word, note: str, *, step: int, call: int, kind: str, name: str, order: float = 0.0, **more: str) -> TensorVerdict:
    """The verdict of a tensor that could not be compared: `missing`, `shape` or `unmapped`.

    Args:
        more: `slot`, `cls`, `source`, `layout`.
    """
    return TensorVerdict(
        step=step,
        call=call,
        kind=kind,
        name=name,
        slot=more.get("slot", ""),
        cls=more.get("cls", ""),
        source=more.get("source", ""),
        layout=more.get("layout", ""),
        rel_err=math.inf,
        abs_err=math.inf,
        tolerance=0.0,
        ratio=math.inf,
        verdict=word,
        order=order,
        note=note,
    )


def flow(tensor: TensorVerdict | ReplicaConflict) -> tuple[int, int, float, int]:
    """Where a tensor stands in the dataflow: its step, phase, order and microbatch."""
    phase = _PHASES.get(tensor.kind, len(_PHASES)) + (len(_PHASES) if tensor.phase else 0)  # a step's evaluation is behind it
    return tensor.step, phase, tensor.order, tensor.call


def failing(tensor: TensorVerdict) -> bool:
    """Whether it makes the runs different."""
    return tensor.verdict in FAILING


def follows(tensor: TensorVerdict, taken: Sequence[TensorVerdict]) -> bool:
    """Whether a module ran after wrong gradients were taken: what updates several times in a step, or asks for gradients, moves parameters between two passes."""
    return min((t.order for t in taken if t.step == tensor.step), default=math.inf) < tensor.order


def first_of(wrong: Sequence[TensorVerdict]) -> TensorVerdict | None:
    """The first in the dataflow; what a module gives after wrong gradients of it were taken follows from these."""
    taken = [t for t in wrong if t.kind == "main_grad"]
    return min((t for t in wrong if t.kind not in ACTIVATIONS or not follows(t, taken)), key=flow, default=None)


def may_begin(tensor: TensorVerdict) -> bool:
    """Whether a tensor that does not decide is off all the same. Of shards that make up no whole nothing is known, but where ranks hold the same one."""
    return tensor.verdict == "unmapped" and tensor.ratio > 1.0 and (tensor.layout == ASTRAY or math.isfinite(tensor.rel_err))


def conclude(
    tensors: Sequence[TensorVerdict],
    replicas: Sequence[ReplicaConflict] = (),
    *,
    unchecked: Sequence[str] = (),
    notes: Sequence[str] = (),
    inconclusive: str = "",
) -> Verdict:
    """The verdict of the whole.

    Args:
        tensors: in any order.
        replicas: conflicts that count.
        unchecked: what was not compared.
        notes: remarks.
        inconclusive: why no comparison of these runs can mean anything (the reference differs from itself, the runs did
            not start from the same parameters, a rank is missing); "" if it can.
    """
    ordered = tuple(sorted(tensors, key=flow))
    conflicts = tuple(sorted(replicas, key=flow))
    compared = [t for t in ordered if t.verdict in COMPARED]
    blind = [t for t in compared if t.verdict == "no-power"]
    wrong = [t for t in ordered if failing(t)]
    first = first_of(wrong)
    outcome: Outcome
    if inconclusive:
        outcome, reason = "inconclusive", inconclusive
    elif wrong or conflicts:
        outcome, reason = "different", _what_differs(wrong, conflicts, len(compared))
    elif not compared:
        outcome, reason = "inconclusive", "no tensor of the candidate could be compared with the reference"
    elif 2 * len(blind) > len(compared):
        outcome, reason = "inconclusive", f"{len(blind):,} of {len(compared):,} tensors have a tolerance too wide to see an error"
    else:
        outcome, reason = "equivalent", _how_close(compared, len(blind))
    return Verdict(
        verdict=outcome,
        first=first,
        tensors=ordered,
        replicas=conflicts,
        unchecked=tuple(unchecked),
        notes=tuple(notes),
        reason=reason,
        checked=len(compared),
    )


def _what_differs(wrong: Sequence[TensorVerdict], conflicts: Sequence[ReplicaConflict], compared: int) -> str:
    words = []
    if wrong:
        words.append(f"{len(wrong):,} of {max(compared, len(wrong)):,} tensors differ by more than rounding")
    if conflicts:
        names = {(c.kind, c.name) for c in conflicts}
        words.append(f"replicas of {len(names):,} tensor{'s' if len(names) > 1 else ''} differ between ranks")
    return "; ".join(words)


def _how_close(compared: Sequence[TensorVerdict], blind: int) -> str:
    sharp = [t for t in compared if t.verdict != "no-power"]
    worst = max(sharp, key=lambda t: t.ratio)
    exact = sum(t.abs_err == 0 for t in sharp)
    text = f"all {len(sharp):,} tensors agree within rounding, {exact:,} exactly; the worst uses {worst.ratio:.0%} of its tolerance"
    return text + (f"; {blind:,} more could not be judged" if blind else "")
