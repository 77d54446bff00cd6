"""Operations that take integers which differ between lanes, done once: those lanes become a first dimension.

A rule says how an operator's meaning is asked for so many cases at once; what has none, or does not take this form of it, is done lane by lane
(`machine.py`). By torch's own kernels, which integers are made with, `torch.vmap` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.meanings import Context, Floats, Meaning, base_of
from proctor.oracle.prove.tape import Array

Rule = Callable[[Context, Meaning, list[Any], Mapping[str, Any]], Any]  # Any: an array, or a tuple of them
_RULES: Final[dict[str, Rule]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register how operators are asked for many lanes; tensors have the lanes as their first dimension, also in the results."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def find(op: str) -> Rule | None:
    """The rule of an operator; None where there is none."""
    base, many = base_of(op)
    return None if many else _RULES.get(base)


@rule("masked_fill", "where", "mul", "add", "sub", "div")
def _elementwise(cx: Context, means: Meaning, args: list[Any], named: Mapping[str, Any]) -> Any:
    """Dimensions are counted from the last one, so shorter tensors get some behind the lanes."""
    most = max(_array(a).ndim for a in args if isinstance(a, Floats | np.ndarray))

    def aligned(value: Any) -> Any:
        if not isinstance(value, Floats | np.ndarray):
            return value
        a = _array(value)
        a = a.reshape(a.shape[:1] + (1,) * (most - a.ndim) + a.shape[1:])
        return Floats(a) if isinstance(value, Floats) else a

    return means(cx, *(aligned(a) for a in args), **named)


@rule("gather", "scatter", "scatter_add")
def _along(cx: Context, means: Meaning, args: list[Any], named: Mapping[str, Any]) -> Any:
    """One dimension later."""
    if _array(args[0]).ndim < 2:
        raise NotImplementedError
    return means(cx, args[0], args[1] + 1 if args[1] >= 0 else args[1], *args[2:], **named)


@rule("embedding")
def _embedding(cx: Context, means: Meaning, args: list[Any], named: Mapping[str, Any]) -> Any:
    """Tables of all lanes are one table."""
    table, at = cx.f(args[0]), args[1]
    starts = (np.arange(len(at)) * table.shape[1]).reshape((-1,) + (1,) * (at.ndim - 1))
    return means(cx, Floats(table.reshape(-1, *table.shape[2:])), at + starts, *args[2:], **named)


@rule("embedding_dense_backward")
def _embedding_backward(cx: Context, means: Meaning, args: list[Any], named: Mapping[str, Any]) -> Any:
    """As sums of rows, on each lane."""
    grad, at, rows, padding, scaled = args
    if padding >= 0 or scaled:
        raise NotImplementedError
    values, flat = cx.f(grad), at.reshape(len(at), -1)
    one_hot = np.zeros((len(at), rows, flat.shape[1]), np.int64)
    one_hot[np.arange(len(at))[:, None], flat, np.arange(flat.shape[1])] = 1
    return cx.d.matmul(cx.d.ints(one_hot), values.reshape(len(at), flat.shape[1], -1)).reshape(len(at), rows, *values.shape[at.ndim :])


def _array(value: Any) -> Array:
    return np.asarray(value.a if isinstance(value, Floats) else value)


def first(found: Array, cut: Sequence[bool], lanes: Sequence[int]) -> Array:
    """Values with lanes as trailing dimensions → those that are cut as one first dimension, and 1 in their place; `lanes`: how many there are of each."""
    axes = len(cut)
    lead = found.ndim - axes
    if axes and any(c and found.shape[lead + k] != lanes[k] for k, c in enumerate(cut)):
        found = np.broadcast_to(found, (*found.shape[:lead], *(lanes[k] if c else found.shape[lead + k] for k, c in enumerate(cut))))
    moved = found.transpose(*(lead + k for k in range(axes) if cut[k]), *range(lead), *(lead + k for k in range(axes) if not cut[k]))
    count = sum(cut)
    rest = iter(moved.shape[count + lead :])
    made: Array = moved.reshape(-1, *moved.shape[count : count + lead], *(1 if cut[k] else next(rest) for k in range(axes)))
    return made


def last(found: Array, cut: Sequence[bool], lanes: Sequence[int]) -> Array:
    """The other way round."""
    axes, lead = len(cut), found.ndim - len(cut) - 1
    rest = [k for k in range(axes) if not cut[k]]
    looped = [k for k in range(axes) if cut[k]]
    wide = found.reshape(*(lanes[k] for k in looped), *found.shape[1 : 1 + lead], *(found.shape[1 + lead + k] for k in rest))
    order = [*looped, *rest]
    behind = {k: (n if n < len(looped) else n + lead) for n, k in enumerate(order)}
    made: Array = wide.transpose(*range(len(looped), len(looped) + lead), *(behind[k] for k in range(axes)))
    return made


__all__ = ["Rule", "find", "first", "last", "rule"]
