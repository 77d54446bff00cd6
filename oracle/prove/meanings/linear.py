"""Products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.tape import Array


@meaning("mm", "bmm", "matmul")
def _mm(cx: Context, a: Any, b: Any, **named: Any) -> Array:
    return cx.d.matmul(cx.f(a), cx.f(b))


@meaning("addmm", "baddbmm")
def _addmm(cx: Context, c: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> Array:
    product = cx.d.matmul(cx.f(a), cx.f(b))
    if alpha != 1:
        product = cx.d.mul(product, cx.f(alpha))
    if beta == 0:
        return product
    return cx.d.add(product, cx.f(c) if beta == 1 else cx.d.mul(cx.f(c), cx.f(beta)))


@meaning("mv")
def _mv(cx: Context, a: Any, b: Any) -> Array:
    return cx.d.matmul(cx.f(a), cx.f(b)[:, None])[:, 0]


@meaning("dot", "vdot")
def _dot(cx: Context, a: Any, b: Any) -> Array:
    return np.asarray(cx.d.matmul(cx.f(a)[None, :], cx.f(b)[:, None])[0, 0])


@meaning("addmv")
def _addmv(cx: Context, c: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Array:
    return cx.d.add(cx.d.mul(cx.f(c), cx.f(beta)), cx.d.mul(_mv(cx, a, b), cx.f(alpha)))


@meaning("linear")
def _linear(cx: Context, x: Any, weight: Any, bias: Any = None) -> Array:
    found = cx.d.matmul(cx.f(x), np.swapaxes(cx.f(weight), -1, -2))
    return found if bias is None else cx.d.add(found, cx.f(bias))
