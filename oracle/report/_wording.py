"""How tensors, errors and places are put into words; every report uses the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from proctor.oracle.judging.verdicts import FAILING, ReplicaConflict, TensorVerdict, Verdict
from proctor.verify.wording import clean, count, ranges

__all__ = ["clean", "count", "ranges"]

KINDS: Final = {
    "input": "input",
    "output": "output",
    "score": "scores",
    "choice": "routing",
    "dropped": "input of dropout",
    "dropout": "dropout",
    "grad_output": "gradient of the output",
    "grad_input": "gradient of the input",
    "param": "parameter before the step",
    "main_grad": "gradient",
    "param_after": "parameter after the step",
    "opt_state": "optimizer state",
    "scalar": "scalar",
    "buffer": "buffer before the step",
    "buffer_after": "buffer after the step",
    "master": "weight against its master copy",
    "weight": "weight",
    "logprob": "log-probabilities",
}
_SHORT: Final = {**KINDS, "grad_output": "grad of output", "grad_input": "grad of input", "param": "before", "param_after": "after", "opt_state": "state"}
_OF_PARAMETERS: Final = frozenset({"param", "main_grad", "param_after", "opt_state", "buffer", "buffer_after", "master", "weight"})
_RANK: Final = {"nonfinite": 0, "bad": 0, "shape": 0, "missing": 0, "warn": 1, "no-power": 2, "ok": 3, "unmapped": 4}


def kind(tensor: TensorVerdict | ReplicaConflict) -> str:
    """`gradient`, `optimizer state exp_avg`: what it is, in words."""
    words = KINDS.get(tensor.kind, tensor.kind)
    return f"{words} {tensor.slot}" if tensor.slot else words


def short_kind(tensor: TensorVerdict | ReplicaConflict) -> str:
    """The same for a column of a table."""
    words = _SHORT.get(tensor.kind, tensor.kind) + (" in evaluation" if tensor.phase == "evaluation" else "")
    return f"{words} {tensor.slot}" if tensor.slot else words


def module(tensor: TensorVerdict | ReplicaConflict) -> str:
    """Path of the module that it belongs to; "" for a scalar and for the model itself."""
    if tensor.kind == "scalar":
        return ""
    return tensor.name.rpartition(".")[0] if tensor.kind in _OF_PARAMETERS else tensor.name


def when(tensor: TensorVerdict | ReplicaConflict) -> str:
    """`step 0, microbatch 1`, `evaluation of step 0, forward 1`."""
    if tensor.kind == "weight":
        return "at the start" if not tensor.step else f"after change {tensor.step} of the weights"
    if tensor.phase:
        return f"{clean(tensor.phase, 20)} of step {tensor.step}, forward {tensor.call}"
    return f"step {tensor.step}" + (f", microbatch {tensor.call}" if tensor.kind not in _OF_PARAMETERS and tensor.kind != "scalar" else "")


def number(value: float) -> str:
    """`3.2e-05`, `0.12`, `∞`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def multiple(value: float) -> str:
    """`5,400 ×`: an error in tolerances."""
    if math.isnan(value) or math.isinf(value):
        return "∞ ×"
    if value >= 1e6:
        return f"{value:.1e} ×"
    return f"{value:,.0f} ×" if value >= 100 else f"{value:.2g} ×" if value >= 0.01 or value == 0 else f"{value:.0e} ×"


def rank_list(numbers: Sequence[int], limit: int = 8) -> str:
    """`rank 3`, `ranks 0–3`."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers, limit)}" if numbers else ""


def error(tensor: TensorVerdict) -> str:
    """How wrong it is, as one sentence without a full stop."""
    if tensor.verdict in ("missing", "shape", "unmapped") or tensor.kind in ("choice", "dropout"):
        return tensor.note
    if tensor.verdict == "nonfinite":
        return "NaN or infinity where the other side has none"
    if math.isinf(tensor.rel_err):
        return f"its norm is {number(tensor.abs_err)}, that of the reference is zero: {multiple(tensor.ratio)} the tolerance"
    return f"differs by {number(tensor.rel_err)} of its norm, {multiple(tensor.ratio)} the tolerance ({number(tensor.tolerance)})"


def conflict(item: ReplicaConflict) -> str:
    """Which ranks hold something else than which, and along what."""
    along = f" along {item.axis}" if item.axis and item.axis != "rank" else ""
    if not item.majority:
        return f"{rank_list(item.ranks)} all differ{along}"
    verb = "holds" if len(item.ranks) == 1 else "hold"
    return f"{rank_list(item.ranks)} {verb} another value than {rank_list(item.majority)}{along}"


def by_weight(tensors: Sequence[TensorVerdict]) -> list[TensorVerdict]:
    """Wrong ones in the order of the dataflow, then those that come closest."""
    return sorted(tensors, key=lambda t: (_RANK[t.verdict], 0.0 if t.verdict in FAILING else -t.ratio))


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def headline(verdict: Verdict) -> str:
    """`Different`, `Equivalent`, `Inconclusive`."""
    return verdict.verdict.capitalize()
