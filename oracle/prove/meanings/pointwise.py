"""Element by element: arithmetic, activations, the parts of optimizers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning, number
from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array


@meaning("add")
def _add(cx: Context, a: Any, b: Any, alpha: Any = 1) -> Array:
    return cx.d.add(cx.f(a), cx.f(b) if alpha == 1 else cx.d.mul(cx.f(b), cx.f(alpha)))


@meaning("sub")
def _sub(cx: Context, a: Any, b: Any, alpha: Any = 1) -> Array:
    return cx.d.sub(cx.f(a), cx.f(b) if alpha == 1 else cx.d.mul(cx.f(b), cx.f(alpha)))


@meaning("rsub")
def _rsub(cx: Context, a: Any, b: Any, alpha: Any = 1) -> Array:
    return _sub(cx, b, a, alpha)


@meaning("mul")
def _mul(cx: Context, a: Any, b: Any) -> Array:
    return cx.d.mul(cx.f(a), cx.f(b))


@meaning("div", "true_divide")
def _div(cx: Context, a: Any, b: Any, rounding_mode: str | None = None) -> Array:
    found = cx.d.mul(cx.f(a), inverse(cx, b))
    return found if rounding_mode is None else cx.d.apply("floor" if rounding_mode == "floor" else "trunc", found)


def inverse(cx: Context, b: Any) -> Array:
    """1 / b; of a number exactly."""
    if isinstance(b, int | float) and b and isinstance(exact := number(b), Fraction | Root):
        return np.asarray(cx.const(1 / exact if isinstance(exact, Fraction) else Root(1 / exact.of, exact.degree)))
    return cx.d.inv(cx.f(b))


def cx_number(value: float) -> Fraction:
    """A finite number as a fraction."""
    found = number(value)
    return found if isinstance(found, Fraction) else Fraction(0)


@meaning("neg")
def _neg(cx: Context, a: Any) -> Array:
    return cx.d.mul(cx.f(a), cx.f(-1))


@meaning("reciprocal")
def _reciprocal(cx: Context, a: Any) -> Array:
    return cx.d.inv(cx.f(a))


@meaning("square")
def _square(cx: Context, a: Any) -> Array:
    return cx.d.square(cx.f(a))


@meaning("pow")
def _pow(cx: Context, a: Any, b: Any) -> Array:
    if isinstance(b, int | float):
        return power(cx, cx.f(a), b)
    return cx.d.apply("pow", *np.broadcast_arrays(cx.f(a), cx.f(b)))


def power(cx: Context, a: Array, b: float) -> Array:
    """a to a number: by multiplication, inversion and roots where that is possible."""
    if b == int(b) and 0 <= abs(b) <= 8:
        found = np.broadcast_to(cx.f(1), a.shape)
        if abs(b) >= 2:
            found = cx.d.square(a)
        for _ in range(int(abs(b)) - (2 if abs(b) >= 2 else 0)):
            found = cx.d.mul(found, a)
        return cx.d.inv(found) if b < 0 else found
    if abs(b) == 0.5:
        root = cx.d.apply("sqrt", a)
        return cx.d.inv(root) if b < 0 else root
    return cx.d.apply("pow", *np.broadcast_arrays(a, cx.f(b)))


@meaning("rsqrt")
def _rsqrt(cx: Context, a: Any) -> Array:
    return cx.d.inv(cx.d.apply("sqrt", cx.f(a)))


def _function(name: str) -> Any:
    def applied(cx: Context, a: Any) -> Array:
        return cx.d.apply(name, cx.f(a))

    return applied


for _name in ("exp", "log", "sqrt", "sigmoid", "tanh", "erf", "sin", "cos", "abs", "relu", "sign", "floor", "ceil", "round", "log1p", "expm1", "log2", "exp2", "atan"):
    meaning(_name)(_function(_name))


@meaning("silu")
def _silu(cx: Context, x: Any) -> Array:
    return cx.d.mul(cx.f(x), cx.d.apply("sigmoid", cx.f(x)))


@meaning("silu_backward")
def _silu_backward(cx: Context, grad: Any, x: Any) -> Array:
    d, v = cx.d, cx.f(x)
    s, one = d.apply("sigmoid", v), cx.f(1)
    return d.mul(cx.f(grad), d.mul(s, d.add(one, d.mul(v, d.sub(one, s)))))


@meaning("sigmoid_backward")
def _sigmoid_backward(cx: Context, grad: Any, y: Any) -> Array:
    d, v = cx.d, cx.f(y)
    return d.mul(cx.f(grad), d.mul(v, d.sub(cx.f(1), v)))


@meaning("tanh_backward")
def _tanh_backward(cx: Context, grad: Any, y: Any) -> Array:
    return cx.d.mul(cx.f(grad), cx.d.sub(cx.f(1), cx.d.square(cx.f(y))))


@meaning("threshold_backward")
def _threshold_backward(cx: Context, grad: Any, x: Any, threshold: Any) -> Array:
    return cx.d.mul(cx.f(grad), cx.d.apply("step", cx.d.sub(cx.f(x), cx.f(threshold))))


_ROOT_2_PI = 0.7978845608028654  # √(2/π)
_HALF_ROOT = 0.7071067811865476  # 1/√2
_DENSITY = 0.3989422804014327  # 1/√(2π)


@meaning("gelu")
def _gelu(cx: Context, x: Any, approximate: str = "none") -> Array:
    d, v = cx.d, cx.f(x)
    inner = d.apply("erf", d.mul(v, cx.f(_HALF_ROOT))) if approximate == "none" else d.apply("tanh", _tanh_argument(cx, v))
    return d.mul(d.mul(v, cx.f(0.5)), d.add(cx.f(1), inner))


def _tanh_argument(cx: Context, v: Array) -> Array:
    d = cx.d
    return d.mul(cx.f(_ROOT_2_PI), d.add(v, d.mul(cx.f(0.044715), d.mul(v, d.square(v)))))


@meaning("gelu_backward")
def _gelu_backward(cx: Context, grad: Any, x: Any, approximate: str = "none") -> Array:
    d, v, one, half = cx.d, cx.f(x), cx.f(1), cx.f(0.5)
    if approximate == "none":
        cdf = d.mul(half, d.add(one, d.apply("erf", d.mul(v, cx.f(_HALF_ROOT)))))
        pdf = d.mul(cx.f(_DENSITY), d.apply("exp", d.mul(cx.f(-0.5), d.square(v))))
        slope = d.add(cdf, d.mul(v, pdf))
    else:
        t = d.apply("tanh", _tanh_argument(cx, v))
        inner = d.mul(cx.f(_ROOT_2_PI), d.add(one, d.mul(cx.f(3 * 0.044715), d.square(v))))
        slope = d.add(d.mul(half, d.add(one, t)), d.mul(d.mul(half, v), d.mul(d.sub(one, d.square(t)), inner)))
    return d.mul(cx.f(grad), slope)


@meaning("where")
def _where(cx: Context, condition: Any, a: Any, b: Any) -> Array:
    return np.where(condition.astype(bool), cx.f(a), cx.f(b))


@meaning("masked_fill")
def _masked_fill(cx: Context, a: Any, mask: Any, value: Any) -> Array:
    return np.where(mask.astype(bool), cx.f(value), cx.f(a))


@meaning("clamp")
def _clamp(cx: Context, a: Any, low: Any = None, high: Any = None, **named: Any) -> Array:
    low, high = named.get("min", low), named.get("max", high)
    found = cx.f(a)
    if low is not None:
        found = cx.d.apply("maximum", *np.broadcast_arrays(found, cx.f(low)))
    if high is not None:
        found = cx.d.apply("minimum", *np.broadcast_arrays(found, cx.f(high)))
    return found


@meaning("clamp_min", "maximum")
def _at_least(cx: Context, a: Any, low: Any = None, **named: Any) -> Array:
    return _clamp(cx, a, named.get("min", named.get("other", low)))


@meaning("clamp_max", "minimum")
def _at_most(cx: Context, a: Any, high: Any = None, **named: Any) -> Array:
    return _clamp(cx, a, None, named.get("max", named.get("other", high)))


@meaning("copy")
def _copy(cx: Context, a: Any, source: Any, non_blocking: Any = False) -> Array:
    return np.broadcast_to(cx.f(source), cx.sizes[0])


@meaning("clone", "_to_copy", "contiguous", "lift_fresh_copy", "_unsafe_view", "alias", "detach", "lift_fresh", "expand_copy", "alias_copy")
def _same(cx: Context, a: Any, *rest: Any, **named: Any) -> Array:
    return cx.f(a).reshape(cx.sizes[0])


@meaning("fill")
def _fill(cx: Context, a: Any, value: Any) -> Array:
    return np.broadcast_to(cx.f(value), cx.sizes[0])


@meaning("zero", "zeros_like", "new_zeros")
def _zeros(cx: Context, *rest: Any, **named: Any) -> Array:
    return np.broadcast_to(cx.f(0), cx.sizes[0])


@meaning("ones_like", "new_ones")
def _ones(cx: Context, *rest: Any, **named: Any) -> Array:
    return np.broadcast_to(cx.f(1), cx.sizes[0])


@meaning("full_like")
def _full_like(cx: Context, a: Any, value: Any, **named: Any) -> Array:
    return np.broadcast_to(cx.f(value), cx.sizes[0])


@meaning("new_full")
def _new_full(cx: Context, a: Any, size: Any, value: Any, **named: Any) -> Array:
    return np.broadcast_to(cx.f(value), cx.sizes[0])


@meaning("lerp")
def _lerp(cx: Context, a: Any, b: Any, weight: Any) -> Array:
    return cx.d.add(cx.f(a), cx.d.mul(cx.f(weight), cx.d.sub(cx.f(b), cx.f(a))))


@meaning("addcmul")
def _addcmul(cx: Context, a: Any, b: Any, c: Any, value: Any = 1) -> Array:
    return cx.d.add(cx.f(a), cx.d.mul(cx.f(value), _times(cx, cx.f(b), cx.f(c))))


def _times(cx: Context, b: Array, c: Array) -> Array:
    same = b.shape == c.shape and np.array_equal(b, c)
    return cx.d.square(b) if same else cx.d.mul(b, c)


@meaning("addcdiv")
def _addcdiv(cx: Context, a: Any, b: Any, c: Any, value: Any = 1) -> Array:
    return cx.d.add(cx.f(a), cx.d.mul(cx.f(value), cx.d.mul(cx.f(b), cx.d.inv(cx.f(c)))))


@meaning("tril", "triu")
def _triangle(cx: Context, a: Any, diagonal: Any = 0) -> Array:
    raise NotImplementedError


def _part(lower: bool) -> Any:
    def triangle(cx: Context, a: Any, diagonal: int = 0) -> Array:
        v = cx.f(a)
        keep = np.tri(v.shape[-2], v.shape[-1], diagonal if lower else diagonal - 1, dtype=bool)
        return np.where(keep if lower else ~keep, v, cx.f(0))

    return triangle


meaning("tril")(_part(lower=True))
meaning("triu")(_part(lower=False))


@meaning("softplus")
def _softplus(cx: Context, a: Any, beta: Any = 1, threshold: Any = 20) -> Array:
    return cx.d.mul(cx.d.apply("softplus", cx.d.mul(cx.f(a), cx.f(beta))), inverse(cx, beta))


@meaning("_fused_dropout", "native_dropout")
def _native_dropout(cx: Context, a: Any, p: Any, train: Any) -> Any:
    mask = cx.recorded[1]
    if mask is None:
        raise NotImplementedError("a mask that was not recorded")
    keep = 1 - cx_number(p)
    return cx.d.mul(cx.d.mul(cx.f(a), cx.d.ints(mask)), np.asarray(cx.const(1 / keep if keep else 0))), None


@meaning("native_dropout_backward")
def _native_dropout_backward(cx: Context, grad: Any, mask: Any, scale: Any) -> Array:
    return cx.d.mul(cx.d.mul(cx.f(grad), cx.f(mask)), cx.f(scale))
