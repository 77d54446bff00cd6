"""Layer norm and RMS norm, forward and backward."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.meanings.reductions import moments
from proctor.oracle.prove.tape import Array


def _axes(v: Array, shape: Any) -> tuple[int, ...]:
    return tuple(range(v.ndim - len(shape), v.ndim))


@meaning("native_layer_norm")
def _layer_norm(cx: Context, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    d, v = cx.d, cx.f(x)
    mean, variance = moments(cx, v, _axes(v, shape), 0)
    scale = d.inv(d.apply("sqrt", cx.cut(d.add(variance, cx.f(eps)))))
    found = cx.cut(d.mul(d.sub(v, mean), scale))
    if weight is not None:
        found = d.mul(found, cx.f(weight))
    if bias is not None:
        found = d.add(found, cx.f(bias))
    return found, mean, scale


@meaning("native_layer_norm_backward")
def _layer_norm_backward(cx: Context, grad: Any, x: Any, shape: Any, mean: Any, scale: Any, weight: Any, bias: Any, wanted: Any) -> Any:
    d, g, v, s = cx.d, cx.f(grad), cx.f(x), cx.f(scale)
    axes = _axes(v, shape)
    outer = tuple(range(v.ndim - len(shape)))
    normal = cx.cut(d.mul(d.sub(v, cx.f(mean)), s))
    inner = g if weight is None else d.mul(g, cx.f(weight))
    part = cx.f(Fraction(1, math.prod(v.shape[a] for a in axes)))
    average = cx.cut(d.mul(d.sum(inner, axes, True), part))
    along = cx.cut(d.mul(d.sum(d.mul(inner, normal), axes, True), part))
    of_x = d.mul(s, d.sub(d.sub(inner, average), d.mul(normal, along))) if wanted[0] else None
    of_weight = d.sum(d.mul(g, normal), outer) if wanted[1] and weight is not None else None
    of_bias = d.sum(g, outer) if wanted[2] and bias is not None else None
    return of_x, of_weight, of_bias


@meaning("_fused_rms_norm")
def _rms_norm(cx: Context, x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    d, v = cx.d, cx.f(x)
    axes = _axes(v, shape)
    part = cx.f(Fraction(1, math.prod(v.shape[a] for a in axes)))
    power = cx.cut(d.mul(d.sum(d.square(v), axes, True), part))
    scale = d.inv(d.apply("sqrt", cx.cut(d.add(power, cx.f(1.1920928955078125e-07 if eps is None else eps)))))
    found = d.mul(v, scale)
    return (found if weight is None else d.mul(found, cx.f(weight))), scale


@meaning("_fused_rms_norm_backward")
def _rms_norm_backward(cx: Context, grad: Any, x: Any, shape: Any, scale: Any, weight: Any, wanted: Any) -> Any:
    d, g, v, s = cx.d, cx.f(grad), cx.f(x), cx.f(scale)
    axes = _axes(v, shape)
    part = cx.f(Fraction(1, math.prod(v.shape[a] for a in axes)))
    inner = g if weight is None else d.mul(g, cx.f(weight))
    normal = d.mul(v, s)
    along = cx.cut(d.mul(d.sum(d.mul(inner, normal), axes, True), part))
    of_x = d.mul(s, d.sub(inner, d.mul(normal, along))) if wanted[0] else None
    outer = tuple(range(v.ndim - len(shape)))
    of_weight = d.sum(d.mul(g, normal), outer) if wanted[1] and weight is not None else None
    return of_x, of_weight
