"""Softmax and cross-entropy: the exponential of what is less than the row's largest, over the sum of these.

A vocabulary in parts does the same with collectives in between: largest by all_reduce(max), sums by all_reduce(sum).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.tape import Array


def _shifted(cx: Context, v: Array, dim: int) -> Array:
    return cx.d.sub(v, np.expand_dims(cx.d.largest(v, dim), dim))


@meaning("_softmax", "_safe_softmax", "softmax")
def _softmax(cx: Context, x: Any, dim: int, *rest: Any, **named: Any) -> Array:
    v = cx.f(x)
    dim %= v.ndim
    e = cx.d.apply("exp", _shifted(cx, v, dim))
    return cx.d.mul(e, cx.d.inv(cx.cut(cx.d.sum(e, (dim,), True))))


@meaning("_log_softmax", "log_softmax")
def _log_softmax(cx: Context, x: Any, dim: int, *rest: Any, **named: Any) -> Array:
    v = cx.f(x)
    dim %= v.ndim
    low = _shifted(cx, v, dim)
    return cx.d.sub(low, cx.d.apply("log", cx.cut(cx.d.sum(cx.d.apply("exp", low), (dim,), True))))


@meaning("_softmax_backward_data")
def _softmax_backward(cx: Context, grad: Any, y: Any, dim: int, dtype: Any = None) -> Array:
    g, v = cx.f(grad), cx.f(y)
    both = cx.d.mul(g, v)
    return cx.d.sub(both, cx.d.mul(v, cx.cut(cx.d.sum(both, (dim % v.ndim,), True))))


@meaning("_log_softmax_backward_data")
def _log_softmax_backward(cx: Context, grad: Any, y: Any, dim: int, dtype: Any = None) -> Array:
    """exp(y) is e^x over its sum: the exponential of a difference with a logarithm, taken apart."""
    g, v = cx.f(grad), cx.f(y)
    return cx.d.sub(g, cx.d.mul(cx.d.apply("exp", v), cx.cut(cx.d.sum(g, (dim % v.ndim,), True))))


def _rows(cx: Context, target: Array, classes: int, ignored: int) -> tuple[Array, Array]:
    keep = (target != ignored).astype(np.int64)
    return np.where(keep.astype(bool), target, 0), keep


@meaning("nll_loss_forward")
def _nll(cx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    v = cx.f(x)
    if v.ndim != 2 or weight is not None:
        raise NotImplementedError("nll_loss with weights")
    rows, keep = _rows(cx, target.reshape(-1), v.shape[-1], ignore_index)
    picked = cx.d.mul(np.take_along_axis(v, rows[:, None], 1)[:, 0], cx.d.ints(-keep))
    count = int(keep.sum())
    if reduction == 0:
        return picked, cx.f(0)
    total = cx.d.sum(picked, (0,))
    return (cx.d.mul(total, cx.f(Fraction(1, max(1, count)))) if reduction == 1 else total), cx.f(count)


@meaning("nll_loss_backward")
def _nll_backward(cx: Context, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any) -> Array:
    v, g = cx.f(x), cx.f(grad)
    if v.ndim != 2 or weight is not None:
        raise NotImplementedError("nll_loss with weights")
    rows, keep = _rows(cx, target.reshape(-1), v.shape[-1], ignore_index)
    scale = cx.f(Fraction(-1, max(1, int(keep.sum()))) if reduction == 1 else -1)
    each = cx.d.mul(np.broadcast_to(cx.d.mul(g, scale), rows.shape), cx.d.ints(keep))
    found = np.broadcast_to(cx.f(0), v.shape).copy()
    found[np.arange(len(rows)), rows] = each
    return found
