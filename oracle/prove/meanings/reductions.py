"""Sums, means, variances, norms, the largest of a row."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from proctor.oracle.prove.domains import normal_axes
from proctor.oracle.prove.meanings import Context, Floats, meaning
from proctor.oracle.prove.meanings.pointwise import power
from proctor.oracle.prove.tape import Array


@meaning("sum")
def _sum(cx: Context, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    v = cx.f(a)
    return cx.d.sum(v, normal_axes(dim, v.ndim), bool(keepdim)) if v.ndim else v


@meaning("mean")
def _mean(cx: Context, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    v = cx.f(a)
    axes = normal_axes(dim, v.ndim)
    total = cx.d.sum(v, axes, bool(keepdim)) if v.ndim else v
    return cx.d.mul(total, cx.f(Fraction(1, math.prod(v.shape[x] for x in axes) or 1)))


def moments(cx: Context, v: Array, axes: tuple[int, ...], correction: float) -> tuple[Array, Array]:
    """Mean and variance over axes, which are kept."""
    count = math.prod(v.shape[x] for x in axes)
    mean = cx.cut(cx.d.mul(cx.d.sum(v, axes, True), cx.f(Fraction(1, count))))
    spread = cx.d.sum(cx.d.square(cx.cut(cx.d.sub(v, mean))), axes, True)
    return mean, cx.cut(cx.d.mul(spread, cx.f(Fraction(1, max(1, count - int(correction))))))


@meaning("var", "std", "var_mean")
def _var(cx: Context, *args: Any, **named: Any) -> Any:
    raise NotImplementedError


def _variance(root: bool, both: bool) -> Any:
    def variance(cx: Context, a: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None or unbiased else 0
        v = cx.f(a)
        mean, found = moments(cx, v, normal_axes(dim, v.ndim), correction)
        if root:
            found = cx.d.apply("sqrt", found)
        return (found.reshape(cx.sizes[0]), mean.reshape(cx.sizes[1])) if both else found.reshape(cx.sizes[0])

    return variance


meaning("var")(_variance(root=False, both=False))
meaning("std")(_variance(root=True, both=False))
meaning("var_mean")(_variance(root=False, both=True))


@meaning("linalg_vector_norm", "norm")
def _norm(cx: Context, a: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    v = cx.f(a)
    axes = normal_axes(dim, v.ndim)
    order = 2 if order is None else order
    if order == math.inf:
        return _along(cx, cx.d.apply("abs", v), axes, bool(keepdim))
    raised = cx.d.square(v) if order == 2 else power(cx, cx.d.apply("abs", v), order)
    total = cx.cut(cx.d.sum(raised, axes, bool(keepdim)) if v.ndim else raised)
    if order == 1:
        return total
    return cx.d.apply("sqrt", total) if order == 2 else power(cx, total, 1 / order)


def _along(cx: Context, v: Array, axes: tuple[int, ...], keep: bool) -> Array:
    for axis in sorted(axes, reverse=True):
        v = cx.d.largest(v, axis)
        if keep:
            v = np.expand_dims(v, axis)
    return v


@meaning("amax")
def _amax(cx: Context, a: Any, dim: Any = (), keepdim: bool = False) -> Array:
    v = cx.f(a)
    return _along(cx, v, normal_axes(dim, v.ndim), bool(keepdim))


@meaning("max")
def _max(cx: Context, a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    v = cx.f(a)
    if len(cx.sizes) == 1 and dim is not None and not isinstance(dim, int):
        return cx.d.apply("maximum", *np.broadcast_arrays(v, cx.f(dim)))
    if len(cx.sizes) == 1:
        return _along(cx, v.reshape(-1), (0,), False)
    return _along(cx, v, normal_axes(dim, v.ndim), bool(keepdim)), None


@meaning("min")
def _min(cx: Context, a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    minus, other = cx.d.mul(cx.f(a), cx.f(-1)), dim if dim is None or isinstance(dim, int) else Floats(cx.d.mul(cx.f(dim), cx.f(-1)))
    found = _max(cx, Floats(minus), other, keepdim)
    return (cx.d.mul(found[0], cx.f(-1)), None) if isinstance(found, tuple) else cx.d.mul(found, cx.f(-1))


@meaning("amin")
def _amin(cx: Context, a: Any, dim: Any = (), keepdim: bool = False) -> Array:
    v = cx.d.mul(cx.f(a), cx.f(-1))
    return cx.d.mul(_along(cx, v, normal_axes(dim, v.ndim), bool(keepdim)), cx.f(-1))


@meaning("logsumexp")
def _logsumexp(cx: Context, a: Any, dim: Any, keepdim: bool = False) -> Array:
    v = cx.f(a)
    axes = normal_axes(dim, v.ndim)
    top = _along(cx, v, axes, True)
    found = cx.d.add(top, cx.d.apply("log", cx.cut(cx.d.sum(cx.d.apply("exp", cx.d.sub(v, top)), axes, True))))
    return found.reshape(cx.sizes[0])


@meaning("cumsum")
def _cumsum(cx: Context, a: Any, dim: int, dtype: Any = None) -> Array:
    v = np.moveaxis(cx.f(a), dim, 0).copy()
    for i in range(1, v.shape[0]):
        v[i] = cx.d.add(v[i - 1], v[i])
    return np.moveaxis(v, 0, dim)


@meaning("topk", "sort", "kthvalue")
def _ordered(cx: Context, a: Any, *rest: Any, **named: Any) -> Any:
    """By the order that this run found: what it chose is a condition of the proof."""
    chosen = cx.recorded[1]
    if chosen is None:
        raise NotImplementedError("an order that was not recorded")
    dim = named.get("dim", rest[1] if len(rest) > 1 and not isinstance(rest[1], bool) else -1)
    v = cx.f(a)
    chosen = chosen.reshape(cx.sizes[1])
    return np.take_along_axis(v, chosen, int(dim) if v.ndim else 0), None
