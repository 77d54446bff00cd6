"""Convolutions of one to three dimensions, also transposed, in groups, with strides, and their backward: products of patches with weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.tape import Array

Ints = tuple[int, ...]


def each(value: Any, dims: int) -> Ints:
    """A number for each dimension, where one stands for all."""
    found = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(int(v) for v in (found * dims if len(found) == 1 else found))


def padded(cx: Context, v: Array, padding: Ints, value: Any = 0) -> Array:
    """With so many rows and columns on all sides."""
    if not any(padding):
        return v
    lead = v.ndim - len(padding)
    grown = np.full([*v.shape[:lead], *(n + 2 * p for n, p in zip(v.shape[lead:], padding))], cx.const(value))
    grown[_inner(v.shape[lead:], padding)] = v
    return grown


def _inner(shape: Sequence[int], padding: Ints) -> Any:
    return (..., *(slice(p, p + n) for n, p in zip(shape, padding)))


def _strided(place: Ints, out: Ints, stride: Ints, dilation: Ints) -> Any:
    """Where an element of the kernel meets the (padded) image."""
    return (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in zip(place, out, stride, dilation)))


def sizes_out(shape: Sequence[int], kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Ints:
    """How large the result is."""
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape, kernel, stride, padding, dilation))


def patches(cx: Context, v: Array, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Array:
    """(rows, channels, elements of the kernel, positions) of (rows, channels, …)."""
    out = sizes_out(v.shape[2:], kernel, stride, padding, dilation)
    whole = padded(cx, v, padding)
    parts = [whole[_strided(place, out, stride, dilation)].reshape(*v.shape[:2], math.prod(out)) for place in itertools.product(*map(range, kernel))]
    return np.stack(parts, 2)


def put_back(cx: Context, cols: Array, shape: Ints, out: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Array:
    """The sum of all patches, each where it was taken from; `shape`: of the image."""
    whole = np.broadcast_to(cx.f(0), (*cols.shape[:2], *(n + 2 * p for n, p in zip(shape, padding)))).copy()
    for k, place in enumerate(itertools.product(*map(range, kernel))):
        at = _strided(place, out, stride, dilation)
        whole[at] = cx.d.add(whole[at], cols[:, :, k].reshape(*cols.shape[:2], *out))
    return np.ascontiguousarray(whole[_inner(shape, padding)])


def _grouped(v: Array, groups: int) -> Array:
    """Channels in groups: (rows, groups, channels, …)."""
    return v.reshape(v.shape[0], groups, v.shape[1] // groups, *v.shape[2:])


class _Form:
    """Numbers of a convolution."""

    def __init__(self, weight: Array, stride: Any, padding: Any, dilation: Any, groups: int) -> None:
        self.kernel = tuple(weight.shape[2:])
        dims = len(self.kernel)
        self.stride, self.padding, self.dilation, self.groups = each(stride, dims), each(padding, dims), each(dilation, dims), groups

    @property
    def numbers(self) -> tuple[Ints, Ints, Ints, Ints]:
        """As `patches` and `put_back` want them."""
        return self.kernel, self.stride, self.padding, self.dilation


def _forward(cx: Context, x: Array, weight: Array, form: _Form) -> Array:
    """(rows, out, …): each group's weights times its patches."""
    cols = _grouped(patches(cx, x, *form.numbers), form.groups)
    rows = cols.reshape(*cols.shape[:2], -1, cols.shape[-1])
    matrix = weight.reshape(form.groups, weight.shape[0] // form.groups, -1)
    found = cx.d.matmul(matrix[None], rows)
    return found.reshape(x.shape[0], weight.shape[0], *sizes_out(x.shape[2:], *form.numbers))


def _backward_input(cx: Context, grad: Array, weight: Array, shape: Ints, form: _Form) -> Array:
    """What comes to an image of `shape`."""
    given = _grouped(grad.reshape(*grad.shape[:2], -1), form.groups)
    matrix = np.swapaxes(weight.reshape(form.groups, weight.shape[0] // form.groups, -1), -1, -2)
    cols = cx.d.matmul(matrix[None], given).reshape(grad.shape[0], form.groups * weight.shape[1], math.prod(form.kernel), -1)
    return put_back(cx, cols, shape, tuple(grad.shape[2:]), *form.numbers)


def _backward_weight(cx: Context, grad: Array, x: Array, weight: Array, form: _Form) -> Array:
    cols = _grouped(patches(cx, x, *form.numbers), form.groups)
    rows = np.moveaxis(cols.reshape(*cols.shape[:2], -1, cols.shape[-1]), 0, 2)  # groups, elements, rows, positions
    given = np.moveaxis(_grouped(grad.reshape(*grad.shape[:2], -1), form.groups), 0, 2)
    flat = [np.ascontiguousarray(a).reshape(*a.shape[:2], -1) for a in (given, rows)]
    return cx.d.matmul(flat[0], np.swapaxes(flat[1], -1, -2)).reshape(weight.shape)


def _with_bias(cx: Context, found: Array, bias: Any) -> Array:
    return found if bias is None else cx.d.add(found, cx.f(bias).reshape(-1, *(1,) * (found.ndim - 2)))


@meaning("convolution", "_convolution")
def _convolution(cx: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, more: Any, groups: int, *rest: Any) -> Array:
    v, w = cx.f(x), cx.f(weight)
    form = _Form(w, stride, padding, dilation, groups)
    if not transposed:
        return _with_bias(cx, _forward(cx, v, w, form), bias)
    extra = each(more, len(form.kernel))
    shape = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in zip(v.shape[2:], *form.numbers, extra))
    return _with_bias(cx, _backward_input(cx, v, w, shape, form), bias)


@meaning("convolution_backward")
def _convolution_backward(cx: Context, grad: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, more: Any, groups: int, wanted: Any) -> Any:
    g, v, w = cx.f(grad), cx.f(x), cx.f(weight)
    form = _Form(w, stride, padding, dilation, groups)
    of_bias = cx.d.sum(g, (0, *range(2, g.ndim))) if wanted[2] else None
    if transposed:
        of_x = _forward(cx, g, w, form) if wanted[0] else None
        return of_x, _backward_weight(cx, v, g, w, form) if wanted[1] else None, of_bias
    of_x = _backward_input(cx, g, w, tuple(v.shape[2:]), form) if wanted[0] else None
    return of_x, _backward_weight(cx, g, v, w, form) if wanted[1] else None, of_bias
