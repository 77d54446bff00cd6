"""Pooling and resizing: averages of patches, the largest of a patch as this run found it, and what lies between pixels."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.meanings.convolution import each, patches, put_back, sizes_out
from proctor.oracle.prove.meanings.indexing import collected
from proctor.oracle.prove.tape import Array


def _images(v: Array, dims: int) -> Array:
    """With a dimension of rows, where there is none."""
    return v if v.ndim == dims + 2 else v[None]


def _average(dims: int) -> Any:
    def average(cx: Context, x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil: bool = False, counted: bool = True, divisor: Any = None) -> Array:
        v = _images(cx.f(x), dims)
        form = _form(kernel, stride, padding, dims, ceil)
        total = cx.d.sum(patches(cx, v, *form), (2,))
        return cx.d.mul(total, cx.f(_share(v, form, counted, divisor))).reshape(cx.sizes[0])

    return average


def _average_backward(dims: int) -> Any:
    def backward(cx: Context, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, counted: bool, divisor: Any) -> Array:
        v, g = _images(cx.f(x), dims), _images(cx.f(grad), dims)
        form = _form(kernel, stride, padding, dims, ceil)
        given = cx.d.mul(g.reshape(*g.shape[:2], 1, -1), cx.f(_share(v, form, counted, divisor)))
        cols = np.broadcast_to(given, (*given.shape[:2], math.prod(form[0]), given.shape[-1]))
        return put_back(cx, cols, tuple(v.shape[2:]), tuple(g.shape[2:]), *form).reshape(cx.sizes[0])

    return backward


Numbers = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _form(kernel: Any, stride: Any, padding: Any, dims: int, ceil: bool) -> Numbers:
    if ceil:
        raise NotImplementedError("pooling with sizes that are rounded up")
    sizes = each(kernel, dims)
    return sizes, each(stride, dims) if stride else sizes, each(padding, dims), (1,) * dims


def _share(v: Array, form: Numbers, counted: bool, divisor: Any) -> Fraction:
    if divisor:
        return Fraction(1, int(divisor))
    if not counted and any(form[2]):
        raise NotImplementedError("averages that do not count what is padded")
    return Fraction(1, math.prod(form[0]))


for _dims in (1, 2, 3):
    meaning(f"avg_pool{_dims}d")(_average(_dims))
    meaning(f"avg_pool{_dims}d_backward")(_average_backward(_dims))


def _largest(dims: int) -> Any:
    def largest(cx: Context, x: Any, *rest: Any, **named: Any) -> Any:
        """By the order that this run found, as with `topk`."""
        at = cx.recorded[1]
        if at is None:
            raise NotImplementedError("an order that was not recorded")
        v, out = cx.f(x), cx.sizes[0]
        flat = v.reshape(*v.shape[:-dims], -1)
        return np.take_along_axis(flat, at.reshape(*out[: len(out) - dims], -1), -1).reshape(out), None

    return largest


def _largest_backward(dims: int) -> Any:
    def backward(cx: Context, grad: Any, x: Any, *rest: Any, **named: Any) -> Array:
        v, g, at = cx.f(x), cx.f(grad), np.asarray(named["indices"] if "indices" in named else rest[-1])
        planes = math.prod(v.shape[:-dims])
        size = v.size // planes
        where = at.reshape(planes, -1) + np.arange(planes)[:, None] * size
        return collected(cx, v.size, where.reshape(-1), g.reshape(-1)).reshape(v.shape)

    return backward


for _dims in (2, 3):
    meaning(f"max_pool{_dims}d_with_indices")(_largest(_dims))
    meaning(f"max_pool{_dims}d_with_indices_backward")(_largest_backward(_dims))


def _parts(size: int, out: int) -> Array:
    """Row i has the shares with which an adaptive average takes of each of `size` elements."""
    found = np.zeros((out, size), object)
    for i in range(out):
        low, high = i * size // out, -(-(i + 1) * size // out)
        found[i, low:high] = Fraction(1, high - low)
    return found


def _constants(cx: Context, fractions: Array) -> Array:
    return np.array([cx.const(Fraction(f)) for f in fractions.reshape(-1)], cx.d.dtype).reshape(fractions.shape)


def along(cx: Context, v: Array, matrices: list[Array]) -> Array:
    """Each of the last dimensions times a matrix of numbers, (out, size)."""
    for k, matrix in enumerate(matrices):
        dim = v.ndim - len(matrices) + k
        moved = np.moveaxis(v, dim, -1)
        v = np.moveaxis(cx.d.matmul(np.ascontiguousarray(moved).reshape(-1, 1, moved.shape[-1]), _constants(cx, matrix.T)[None]).reshape(*moved.shape[:-1], -1), -1, dim)
    return v


def _adaptive(dims: int) -> Any:
    def average(cx: Context, x: Any, out: Any) -> Array:
        v = cx.f(x)
        return along(cx, v, [_parts(n, m) for n, m in zip(v.shape[-dims:], each(out, dims))])

    return average


def _adaptive_backward(dims: int) -> Any:
    def backward(cx: Context, grad: Any, x: Any) -> Array:
        v, g = cx.f(x), cx.f(grad)
        return along(cx, g, [_parts(n, m).T for n, m in zip(v.shape[-dims:], g.shape[-dims:])])

    return backward


for _dims in (2, 3):
    meaning(f"_adaptive_avg_pool{_dims}d")(_adaptive(_dims))
    meaning(f"_adaptive_avg_pool{_dims}d_backward")(_adaptive_backward(_dims))


def _nearest(size: int, out: int, scale: float | None) -> Array:
    found = np.zeros((out, size), object)
    step = 1 / scale if scale else size / out
    for i in range(out):
        found[i, min(math.floor(i * step), size - 1)] = Fraction(1)
    return found


def _linear(size: int, out: int, corners: bool, scale: float | None) -> Array:
    """Shares of the two pixels that a point lies between."""
    found = np.zeros((out, size), object)
    step = Fraction(size - 1, out - 1) if corners and out > 1 else Fraction(0) if corners else (1 / Fraction(scale).limit_denominator(4096) if scale else Fraction(size, out))
    for i in range(out):
        at = i * step if corners else max(Fraction(0), (i + Fraction(1, 2)) * step - Fraction(1, 2))
        low = min(int(at), size - 1)
        share = at - low
        found[i, low] += 1 - share
        found[i, min(low + 1, size - 1)] += share
    return found


def _scales(rest: tuple[Any, ...], dims: int) -> list[Any]:
    given = [*rest, *[None] * dims][:dims]
    return [float(s) if s else None for s in given]


def _resized(dims: int, linear: bool, backward: bool) -> Any:
    def resized(cx: Context, x: Any, out: Any, *rest: Any, **named: Any) -> Array:
        v = cx.f(x)
        sizes = list(rest[0][-dims:]) if backward else list(v.shape[-dims:])
        target = list(v.shape[-dims:]) if backward else list(cx.sizes[0][-dims:])
        rest = rest[1:] if backward else rest
        corners, rest = (bool(rest[0]), rest[1:]) if linear else (False, rest)
        if rest and isinstance(rest[0], list):  # of the form with a list of factors
            rest = tuple(rest[0])
        matrices = [_linear(n, m, corners, s) if linear else _nearest(n, m, s) for n, m, s in zip(sizes, target, _scales(rest, dims))]
        return along(cx, v, [m.T for m in matrices] if backward else matrices)

    return resized


for _dims, _word in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
    for _back in (False, True):
        _end = "_backward" if _back else ""
        meaning(f"upsample_nearest{_dims}d{_end}")(_resized(_dims, False, _back))
        meaning(f"upsample_{_word}{_dims}d{_end}")(_resized(_dims, True, _back))

__all__ = ["along", "sizes_out"]
