"""Complex numbers as pairs of reals, such as of rotary positions: products, conjugates, what lies on the unit circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proctor.oracle.prove.domains import normal_axes
from proctor.oracle.prove.meanings import Context, F, Pairs, meaning
from proctor.oracle.prove.tape import COMPLEX, Array

Parts = tuple[Array, Array]


def _names(*names: str) -> Callable[[F], F]:
    return meaning(*(COMPLEX + name for name in names))


def _parts(cx: Context, value: Any) -> Parts:
    """Real and imaginary; of a real argument 0."""
    if isinstance(value, Pairs):
        return value.a[..., 0], value.a[..., 1]
    real = cx.f(value)
    return real, np.broadcast_to(cx.f(0), real.shape)


def _joined(real: Array, imaginary: Array) -> Array:
    return np.stack(np.broadcast_arrays(real, imaginary), -1)


def _times(cx: Context, x: Parts, y: Parts) -> Parts:
    d = cx.d
    return d.sub(d.mul(x[0], y[0]), d.mul(x[1], y[1])), d.add(d.mul(x[0], y[1]), d.mul(x[1], y[0]))


@_names("mul")
def _mul(cx: Context, a: Any, b: Any) -> Array:
    return _joined(*_times(cx, _parts(cx, a), _parts(cx, b)))


@_names("div")
def _div(cx: Context, a: Any, b: Any) -> Array:
    x, y = _parts(cx, a), _parts(cx, b)
    size = cx.d.inv(cx.d.add(cx.d.square(y[0]), cx.d.square(y[1])))
    real, imaginary = _times(cx, x, (y[0], cx.d.mul(y[1], cx.f(-1))))
    return _joined(cx.d.mul(real, size), cx.d.mul(imaginary, size))


def _sum_of(sign: int) -> Callable[..., Array]:
    def added(cx: Context, a: Any, b: Any, alpha: Any = 1) -> Array:
        x, y = _parts(cx, a), _parts(cx, b)
        return _joined(*(cx.d.add(p, cx.d.mul(q, cx.f(sign * alpha))) for p, q in zip(x, y)))

    return added


_names("add")(_sum_of(1))
_names("sub")(_sum_of(-1))


@_names("neg")
def _neg(cx: Context, a: Any) -> Array:
    return cx.d.mul(_joined(*_parts(cx, a)), cx.f(-1))


@_names("conj_physical")
def _conjugate(cx: Context, a: Any) -> Array:
    real, imaginary = _parts(cx, a)
    return _joined(real, cx.d.mul(imaginary, cx.f(-1)))


@_names("polar")
def _polar(cx: Context, size: Any, angle: Any) -> Array:
    s, a = cx.f(size), cx.f(angle)
    return _joined(cx.d.mul(s, cx.d.apply("cos", a)), cx.d.mul(s, cx.d.apply("sin", a)))


@_names("complex")
def _complex(cx: Context, real: Any, imaginary: Any) -> Array:
    return _joined(cx.f(real), cx.f(imaginary))


@_names("abs")
def _abs(cx: Context, a: Any) -> Array:
    real, imaginary = _parts(cx, a)
    return cx.d.apply("sqrt", cx.d.add(cx.d.square(real), cx.d.square(imaginary)))


@_names("clone", "_to_copy", "_unsafe_view", "lift_fresh", "lift_fresh_copy", "detach", "alias")
def _same(cx: Context, a: Any, *rest: Any, **named: Any) -> Array:
    if not isinstance(a, Pairs) or cx.sizes[0][-1:] != (2,):
        raise NotImplementedError("a change between real and complex numbers")
    return a.a.reshape(cx.sizes[0])


@_names("copy")
def _copy(cx: Context, a: Any, source: Any, non_blocking: Any = False) -> Array:
    return np.broadcast_to(_joined(*_parts(cx, source)), cx.sizes[0])


@_names("zero", "zeros_like", "new_zeros")
def _zeros(cx: Context, *rest: Any, **named: Any) -> Array:
    return np.broadcast_to(cx.f(0), cx.sizes[0])


@_names("sum")
def _sum(cx: Context, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    real, imaginary = _parts(cx, a)
    axes = normal_axes(dim, real.ndim)
    return _joined(cx.d.sum(real, axes, bool(keepdim)), cx.d.sum(imaginary, axes, bool(keepdim)))


@_names("cat")
def _cat(cx: Context, parts: Any, dim: int = 0) -> Array:
    found = [_parts(cx, p) for p in parts]
    return _joined(np.concatenate([p for p, _ in found], dim), np.concatenate([q for _, q in found], dim))


@_names("stack")
def _stack(cx: Context, parts: Any, dim: int = 0) -> Array:
    found = [_parts(cx, p) for p in parts]
    return _joined(np.stack([p for p, _ in found], dim), np.stack([q for _, q in found], dim))


@_names("index")
def _index(cx: Context, a: Any, indices: Any) -> Array:
    from proctor.oracle.prove.meanings.indexing import places

    real, imaginary = _parts(cx, a)
    at = places(real.shape, indices)
    return _joined(real.reshape(-1)[at], imaginary.reshape(-1)[at])
