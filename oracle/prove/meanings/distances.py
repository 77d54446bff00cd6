"""Distances of rows, and products of three."""

from __future__ import annotations

from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.tape import Array


def _apart(cx: Context, x: Any, y: Any) -> Array:
    return cx.d.sub(cx.f(x)[..., :, None, :], cx.f(y)[..., None, :, :])


@meaning("_cdist_forward")
def _distances(cx: Context, x: Any, y: Any, order: float, mode: Any = None) -> Array:
    if order != 2:
        raise NotImplementedError("distances of another order than 2")
    return cx.d.apply("sqrt", cx.cut(cx.d.sum(cx.d.square(_apart(cx, x, y)), (cx.f(x).ndim,))))


@meaning("_cdist_backward")
def _distances_backward(cx: Context, grad: Any, x: Any, y: Any, order: float, found: Any) -> Array:
    if order != 2:
        raise NotImplementedError("distances of another order than 2")
    share = cx.d.mul(cx.f(grad), cx.d.inv(cx.f(found)))
    return cx.d.sum(cx.d.mul(share[..., None], _apart(cx, x, y)), (share.ndim - 1,))


@meaning("_trilinear")
def _trilinear(cx: Context, a: Any, b: Any, c: Any, expand_a: Any, expand_b: Any, expand_c: Any, summed: Any, unroll: int = 1) -> Array:
    """The product of three arrays, each with dimensions put in, added up over some."""
    arrays = []
    for value, dims in ((a, expand_a), (b, expand_b), (c, expand_c)):
        v = cx.f(value)
        for dim in sorted(dims):
            v = np.expand_dims(v, dim)
        arrays.append(v)
    return cx.d.sum(cx.d.mul(cx.d.mul(arrays[0], arrays[1]), arrays[2]), tuple(sorted(summed)))
