"""Batch norm and group norm, forward and backward. What a batch's norm leaves in its running averages is written there, too."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.meanings.reductions import moments
from proctor.oracle.prove.tape import Array


def _channels(cx: Context, a: Any, dims: int) -> Array:
    """A number a channel, to meet (rows, channels, …)."""
    return cx.f(a).reshape(-1, *(1,) * (dims - 2))


def _affine(cx: Context, v: Array, weight: Any, bias: Any) -> Array:
    if weight is not None:
        v = cx.d.mul(v, _channels(cx, weight, v.ndim))
    return v if bias is None else cx.d.add(v, _channels(cx, bias, v.ndim))


@meaning("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(cx: Context, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float) -> Any:
    d, v = cx.d, cx.f(x)
    axes = (0, *range(2, v.ndim))
    if training:
        middle, spread = moments(cx, v, axes, 0)
    else:
        middle, spread = (cx.f(a).reshape(1, -1, *(1,) * (v.ndim - 2)) for a in (mean, variance))
    scale = d.inv(d.apply("sqrt", cx.cut(d.add(spread, cx.f(eps)))))
    found = _affine(cx, cx.cut(d.mul(d.sub(v, middle), scale)), weight, bias)
    if not training:
        return (found, *(cx.f(0).reshape(-1)[:0] for _ in range(2)))
    kept = [found, middle.reshape(-1), scale.reshape(-1)]
    if mean is not None and len(cx.sizes) > 3:
        count, share, rest = v.size // v.shape[1], cx.f(momentum), d.sub(cx.f(1), cx.f(momentum))
        unbiased = d.mul(spread.reshape(-1), cx.f(Fraction(count, max(1, count - 1))))
        kept += [d.add(d.mul(cx.f(old), rest), d.mul(new, share)) for old, new in ((mean, middle.reshape(-1)), (variance, unbiased))]
    return tuple(kept)


@meaning("native_batch_norm_backward")
def _batch_norm_backward(cx: Context, grad: Any, x: Any, weight: Any, mean: Any, variance: Any, kept_mean: Any, kept_scale: Any, training: bool, eps: float, wanted: Any) -> Any:
    d, g, v = cx.d, cx.f(grad), cx.f(x)
    axes = (0, *range(2, v.ndim))
    middle = _channels(cx, kept_mean if training else mean, v.ndim)
    scale = _channels(cx, kept_scale, v.ndim) if training else d.inv(d.apply("sqrt", d.add(_channels(cx, variance, v.ndim), cx.f(eps))))
    normal = cx.cut(d.mul(d.sub(v, middle), scale))
    along, total = cx.cut(d.sum(d.mul(g, normal), axes, True)), d.sum(g, axes, True)
    of_x = None
    if wanted[0]:
        share = cx.f(Fraction(1, math.prod(v.shape[a] for a in axes)))
        inner = d.sub(d.sub(g, d.mul(total, share)), d.mul(normal, d.mul(along, share))) if training else g
        of_x = d.mul(inner, scale)
        if weight is not None:
            of_x = d.mul(of_x, _channels(cx, weight, v.ndim))
    return of_x, along.reshape(-1) if wanted[1] else None, total.reshape(-1) if wanted[2] else None


@meaning("native_group_norm")
def _group_norm(cx: Context, x: Any, weight: Any, bias: Any, rows: int, channels: int, size: int, groups: int, eps: float) -> Any:
    d, v = cx.d, cx.f(x)
    parts = v.reshape(rows, groups, -1)
    middle, spread = moments(cx, parts, (2,), 0)
    scale = d.inv(d.apply("sqrt", cx.cut(d.add(spread, cx.f(eps)))))
    normal = cx.cut(d.mul(d.sub(parts, middle), scale)).reshape(v.shape)
    return _affine(cx, normal, weight, bias), middle.reshape(rows, groups), scale.reshape(rows, groups)


@meaning("native_group_norm_backward")
def _group_norm_backward(cx: Context, grad: Any, x: Any, mean: Any, scale: Any, weight: Any, rows: int, channels: int, size: int, groups: int, wanted: Any) -> Any:
    d, g, v = cx.d, cx.f(grad), cx.f(x)
    one, s = cx.f(mean).reshape(rows, groups, 1), cx.f(scale).reshape(rows, groups, 1)
    normal = cx.cut(d.mul(d.sub(v.reshape(rows, groups, -1), one), s))
    whole = normal.reshape(v.shape)
    axes = (0, *range(2, v.ndim))
    of_x = None
    if wanted[0]:
        inner = (g if weight is None else d.mul(g, _channels(cx, weight, v.ndim))).reshape(rows, groups, -1)
        share = cx.f(Fraction(1, inner.shape[-1]))
        average = d.mul(d.sum(inner, (2,), True), share)
        along = d.mul(d.sum(d.mul(inner, normal), (2,), True), share)
        of_x = d.mul(s, d.sub(d.sub(inner, average), d.mul(normal, along))).reshape(v.shape)
    return of_x, d.sum(d.mul(g, whole), axes) if wanted[1] else None, d.sum(g, axes) if wanted[2] else None
