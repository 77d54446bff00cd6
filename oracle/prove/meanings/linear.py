"""Products of matrices."""

from __future__ import annotations

import itertools
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


@meaning("_grouped_mm")
def _grouped_mm(cx: Context, a: Any, b: Any, ends: Any = None, bias: Any = None, **named: Any) -> Array:
    """Rows in groups, each with a matrix of its own, as experts have them; or columns in groups, each of which gives a matrix."""
    x, y = cx.f(a), cx.f(b)
    if ends is None or bias is not None:
        raise NotImplementedError("grouped products without ends, or with a bias")
    starts = [0, *np.asarray(ends).tolist()]
    parts = [slice(low, high) for low, high in itertools.pairwise(starts)]
    if x.ndim == 2 and y.ndim == 3:
        found = np.broadcast_to(cx.f(0), (x.shape[0], y.shape[-1])).copy()
        for part, matrix in zip(parts, y):
            found[part] = cx.d.matmul(x[part], matrix)
        return found
    if x.ndim == 2 and y.ndim == 2:
        return np.stack([cx.d.matmul(x[:, part], y[part]) if part.stop > part.start else np.broadcast_to(cx.f(0), (x.shape[0], y.shape[1])) for part in parts])
    raise NotImplementedError("grouped products of these shapes")
