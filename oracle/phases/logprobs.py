"""Log-probabilities of the tokens that a model read, as a trainer and an engine have to agree on them: one number a token.

They come from the logits that leave the model and the tokens that go into it; the tolerance comes from the noise runs, as that of any
tensor. Where logits differ by a constant these do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import TensorVerdict, judge
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.numbers.tolerance import tolerance

if TYPE_CHECKING:
    from proctor.oracle.judging.check import Comparison
    from proctor.oracle.merging.reference import Key
    from proctor.oracle.store import RankRecord

Array = npt.NDArray[Any]


def log_probabilities(found: Comparison) -> tuple[list[TensorVerdict], list[str]]:
    """A verdict on each forward that reads tokens and gives logits, and a sentence on all of them.

    Args:
        found: comparison of forwards, after its tensors were judged.
    """
    reference = found.reference
    verdicts: list[TensorVerdict] = []
    tokens, worst, total, noise = 0, 0.0, 0.0, 0.0
    for key, ids in _pairs(found).items():
        merged = found.assembler.merge(key)
        entry = reference.entries[key]
        if merged is None or merged.full is None or not all(p.firm for p in merged.pieces):
            continue
        there = reference.entries[ids]
        read = reference.array(there)
        theirs = scores(as_float(reference.array(entry), entry.dtype), read)
        mine = scores(as_float(merged.full, entry.dtype), read)
        moved = [scores(as_float(ranks[reference.owner[key]].array(other), other.dtype), read) for ranks in reference.samples if (other := _same(ranks, reference.owner[key], key)) is not None]
        if not theirs.size or mine.shape != theirs.shape:
            continue
        sums = compare(mine, theirs, "float64")
        error = math.sqrt(sum(float(np.sum((m - theirs) ** 2)) for m in moved) / len(moved)) if moved else math.inf
        allowed = tolerance(error, sums.size, entry.dtype, n=sums.n, mode=found.mode, samples=max(1, len(moved)))
        apart = np.abs(mine - theirs)
        tokens, worst, total = tokens + apart.size, max(worst, float(apart.max())), total + float(apart.sum())
        noise = max([noise, *(float(np.abs(m - theirs).max()) for m in moved)])
        note = f"log-probabilities of tokens differ by {apart.max():.2g} at most, {apart.mean():.2g} on average" if sums.error > allowed.absolute else ""
        verdicts.append(
            judge(sums, allowed, step=key[0], call=key[1], kind="logprob", name=key[3], cls=entry.cls, source=entry.source, order=float(entry.order) + 0.5, note=note, ranks=sorted({p.rank for p in merged.pieces}))
        )
    said = f"log-probabilities of {tokens:,} tokens: they differ by {worst:.2g} at most, {total / tokens:.2g} on average; rounding noise moves them by {noise:.2g}" if tokens else ""
    return verdicts, [said] if said else []


def scores(logits: Array, read: Array) -> Array:
    """Log-probability of each token that is read after a position: rows × (positions − 1), from logits of rows × positions × vocabulary."""
    if logits.shape[:2] != read.shape or read.shape[1] < 2:
        return np.zeros((0,))
    x = logits[:, :-1].astype(np.float64)
    top = x.max(axis=-1, keepdims=True)
    norm = top[..., 0] + np.log(np.exp(x - top).sum(axis=-1))
    following = read[:, 1:].astype(np.int64)
    inside = (following >= 0) & (following < x.shape[-1])
    at = np.take_along_axis(x, np.where(inside, following, 0)[..., None], axis=-1)[..., 0]
    return np.where(inside, at - norm, 0.0)


def _pairs(found: Comparison) -> dict[Key, Key]:
    """By logits that leave the model the tokens that went into it, of the same forward."""
    order = found.reference.order
    ids = {k[1]: k for k in reversed(order) if k[2] == "input" and len(found.reference.entries[k].shape) == 2 and found.reference.entries[k].dtype in ("int64", "int32")}
    out: dict[Key, Key] = {}
    for key in order:
        entry = found.reference.entries[key]
        there = ids.get(key[1])
        if key[2] == "output" and there is not None and key[3] == there[3] and len(entry.shape) == 3 and is_floating(entry.dtype) and entry.shape[:2] == found.reference.entries[there].shape:
            out.setdefault(key, there)
    return out


def _same(ranks: Mapping[int, RankRecord], rank: int, key: Key) -> Any:
    return next((e for e in ranks[rank].entries if (e.step, e.call, e.kind, e.name, e.slot) == key), None)
