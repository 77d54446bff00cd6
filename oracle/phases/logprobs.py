"""Log-probabilities of the tokens that a model read, as a trainer and an engine have to agree on them: one number a token.

They come from the logits that leave the model and the tokens that go into it, or were formed there (`collect/edges/scored.py`); the tolerance comes from the noise runs, as that of any
tensor. Where logits differ by a constant these do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import TensorVerdict, judge
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.numbers.tolerance import tolerance
from proctor.oracle.tensors import NOT_SCORED

if TYPE_CHECKING:
    from proctor.oracle.judging.check import Comparison
    from proctor.oracle.merging.reference import Key
    from proctor.oracle.store import RankRecord

Array = npt.NDArray[Any]
_Source = tuple[Callable[[Array], Array], str]  # log-probabilities of a tensor's values, and the type that logits were rounded to


def log_probabilities(found: Comparison) -> tuple[list[TensorVerdict], list[str]]:
    """A verdict on each forward that reads tokens and gives logits, and a sentence on all of them.

    Args:
        found: comparison of forwards, after its tensors were judged.
    """
    reference = found.reference
    verdicts: list[TensorVerdict] = []
    tokens, worst, total, noise = 0, 0.0, 0.0, 0.0
    recorded = _recorded(found)
    had = {key[1] for key in recorded}
    for key, (of, precision) in {**recorded, **{k: s for k, s in _of_logits(found).items() if k[1] not in had}}.items():
        merged = found.assembler.merge(key)
        entry = reference.entries[key]
        if merged is None or merged.full is None or not all(p.firm for p in merged.pieces):
            continue
        theirs, mine = of(reference.array(entry)), of(merged.full)
        moved = [of(ranks[reference.owner[key]].array(other)) for ranks in reference.samples if (other := _same(ranks, reference.owner[key], key)) is not None]
        if not theirs.size or mine.shape != theirs.shape:
            continue
        known = (theirs != NOT_SCORED) & (mine != NOT_SCORED)
        theirs, mine, moved = theirs[known], mine[known], [m[known] for m in moved if m.shape == known.shape]
        if not theirs.size:
            continue
        sums = compare(mine, theirs, "float64")
        error = math.sqrt(sum(float(np.sum((m - theirs) ** 2)) for m in moved) / len(moved)) if moved else math.inf
        allowed = tolerance(error, sums.size, precision, n=sums.n, mode=found.mode, samples=max(1, len(moved)))
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


def _of_logits(found: Comparison) -> dict[Key, _Source]:
    """By logits that leave the model as a whole, how they score the tokens that went into it in the same forward."""
    reference = found.reference
    order = reference.order
    ids = {k[1]: k for k in reversed(order) if k[2] == "input" and len(reference.entries[k].shape) == 2 and reference.entries[k].dtype in ("int64", "int32")}
    out: dict[Key, _Source] = {}
    for key in order:
        entry = reference.entries[key]
        there = ids.get(key[1])
        if key[2] == "output" and not entry.tile and there is not None and key[3] == there[3] and len(entry.shape) == 3 and is_floating(entry.dtype) and entry.shape[:2] == reference.entries[there].shape:
            out.setdefault(key, (functools.partial(_scored, read=reference.array(reference.entries[there]), dtype=entry.dtype), entry.dtype))
    return out


def _recorded(found: Comparison) -> dict[Key, _Source]:
    """Those that were formed while the model ran, where its logits are sums, and all ranks have the whole vocabulary. The first token follows none."""
    reference = found.reference
    out: dict[Key, _Source] = {}
    for key in reference.order:
        if key[2] == "logprob":
            theirs = _vocabulary(reference.ranks[reference.owner[key]], key[3])
            mine = [_vocabulary(found.ranks[p.rank], p.entry.name) for p in found.assembler.placed(key)]
            if theirs is not None and all(v is not None and v[0] == theirs[0] for v in mine):
                out[key] = (lambda scored: scored[:, 1:] if scored.shape[1] > 1 else scored), theirs[1]
    return out


def _vocabulary(record: RankRecord, model: str) -> tuple[int, str] | None:
    """How many logits a model gives for a token, and their type."""
    for e in record.entries:
        if e.kind == "output" and e.name == model and len(e.shape) == 3 and is_floating(e.precision):
            return e.shape[2] * (e.tile[2] if e.tile else 1), e.precision
    return None


def _scored(logits: Array, *, read: Array, dtype: str) -> Array:
    return scores(as_float(logits, dtype), read)


def _same(ranks: Mapping[int, RankRecord], rank: int, key: Key) -> Any:
    return next((e for e in ranks[rank].entries if (e.step, e.call, e.kind, e.name, e.slot) == key), None)
