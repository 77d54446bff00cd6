"""Looking up and putting down by integers, which are concrete; joining and cutting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.tape import Array


@meaning("embedding")
def _embedding(cx: Context, weight: Any, at: Any, *rest: Any, **named: Any) -> Array:
    return np.asarray(cx.f(weight)[at])


def collected(cx: Context, rows: int, at: Array, values: Array) -> Array:
    """Row i of the result is the sum of the values that go there."""
    one_hot = np.zeros((rows, at.size), np.int64)
    one_hot[at.reshape(-1), np.arange(at.size)] = 1
    flat = values.reshape(at.size, math.prod(values.shape[at.ndim :]))
    return cx.d.matmul(cx.d.ints(one_hot), flat).reshape(rows, *values.shape[at.ndim :])


@meaning("embedding_dense_backward")
def _embedding_backward(cx: Context, grad: Any, at: Any, rows: int, padding: int, scaled: bool) -> Array:
    values = cx.f(grad)
    if scaled:
        raise NotImplementedError("scale_grad_by_freq")
    if padding >= 0:
        values = np.where((at == padding)[..., None], cx.f(0), values)
    return collected(cx, rows, at, values)


def places(shape: tuple[int, ...], indices: Any) -> Array:
    """Flat positions that an advanced index picks, as numpy and torch agree on them."""
    flat = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    key = tuple(slice(None) if i is None else i for i in indices)
    first = next((k for k, i in enumerate(indices) if i is not None), 0)
    found = flat[key]
    used = [k for k, i in enumerate(indices) if i is not None]
    if used and used[-1] - used[0] + 1 != len(used) and first:
        return found  # separated indices go to the front in both
    return found


@meaning("index", "_unsafe_index")
def _index(cx: Context, a: Any, indices: Any) -> Array:
    v = cx.f(a)
    return v.reshape(-1)[places(v.shape, indices)]


@meaning("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(cx: Context, a: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> Array:
    v = cx.f(a)
    at = places(v.shape, indices)
    given = np.broadcast_to(cx.f(values), at.shape).reshape(-1)
    found = v.reshape(-1).copy()
    if not accumulate:
        found[at.reshape(-1)] = given
    else:
        _accumulate(cx, found, at.reshape(-1), given)
    return found.reshape(v.shape)


def _accumulate(cx: Context, found: Array, at: Array, given: Array) -> None:
    """found[at] += given, where places repeat: one layer of distinct places after the other."""
    order = np.argsort(at, kind="stable")
    at, given = at[order], given[order]
    starts = np.r_[0, np.flatnonzero(np.diff(at)) + 1] if at.size else np.zeros(0, np.int64)
    turn = np.arange(at.size) - np.repeat(starts, np.diff(np.r_[starts, at.size])) if at.size else at
    for layer in range(int(turn.max()) + 1 if at.size else 0):
        now = turn == layer
        found[at[now]] = cx.d.add(found[at[now]], given[now])


@meaning("gather")
def _gather(cx: Context, a: Any, dim: int, at: Any, *rest: Any, **named: Any) -> Array:
    v = cx.f(a)
    if not v.ndim:
        return v.reshape(cx.sizes[0])
    cut = tuple(slice(None) if k == dim % v.ndim else slice(0, n) for k, n in enumerate(at.shape))
    return np.take_along_axis(v[cut], at, dim)


def _along_grid(shape: tuple[int, ...], dim: int, at: Array) -> Array:
    grid: list[Array] = list(np.indices(at.shape))
    grid[dim % len(shape)] = at
    return np.ravel_multi_index(tuple(grid), shape).reshape(-1)


@meaning("scatter")
def _scatter(cx: Context, a: Any, dim: int, at: Any, source: Any, reduce: Any = None, **named: Any) -> Array:
    if reduce is not None:
        raise NotImplementedError("scatter with a reduction")
    v = cx.f(a)
    found = v.reshape(-1).copy()
    given = cx.f(source)
    cut = given[tuple(slice(0, n) for n in at.shape)] if given.ndim else np.broadcast_to(given, at.shape)
    found[_along_grid(v.shape, dim, at)] = cut.reshape(-1)
    return found.reshape(v.shape)


@meaning("scatter_add")
def _scatter_add(cx: Context, a: Any, dim: int, at: Any, source: Any) -> Array:
    v = cx.f(a)
    found = v.reshape(-1).copy()
    given = cx.f(source)[tuple(slice(0, n) for n in at.shape)]
    _accumulate(cx, found, _along_grid(v.shape, dim, at), given.reshape(-1))
    return found.reshape(v.shape)


@meaning("index_select")
def _index_select(cx: Context, a: Any, dim: int, at: Any) -> Array:
    return np.asarray(np.take(cx.f(a), at, axis=dim))


@meaning("index_add")
def _index_add(cx: Context, a: Any, dim: int, at: Any, source: Any, alpha: Any = 1) -> Array:
    v = np.moveaxis(cx.f(a), dim, 0)
    given = np.moveaxis(cx.d.mul(cx.f(source), cx.f(alpha)), dim, 0)
    return np.moveaxis(cx.d.add(v, collected(cx, v.shape[0], at, given)), 0, dim)


@meaning("index_copy")
def _index_copy(cx: Context, a: Any, dim: int, at: Any, source: Any) -> Array:
    v = np.moveaxis(cx.f(a).copy(), dim, 0)
    v[at] = np.moveaxis(cx.f(source), dim, 0)
    return np.moveaxis(v, 0, dim)


@meaning("cat", "concat")
def _cat(cx: Context, parts: Any, dim: int = 0) -> Array:
    found = [v for v in (cx.f(p) for p in parts) if v.shape != (0,)]
    return np.concatenate(found, axis=dim) if found else np.zeros(cx.sizes[0], cx.d.dtype)


@meaning("stack")
def _stack(cx: Context, parts: Any, dim: int = 0) -> Array:
    return np.stack([cx.f(p) for p in parts], axis=dim)


@meaning("repeat")
def _repeat(cx: Context, a: Any, times: Any) -> Array:
    v = cx.f(a)
    return np.tile(v.reshape((1,) * (len(times) - v.ndim) + v.shape), times)


@meaning("flip")
def _flip(cx: Context, a: Any, dims: Any) -> Array:
    return np.flip(cx.f(a), axis=tuple(dims))


@meaning("roll")
def _roll(cx: Context, a: Any, shifts: Any, dims: Any = None) -> Array:
    v = cx.f(a)
    return np.roll(v, shifts, axis=tuple(dims)) if dims else np.roll(v.reshape(-1), shifts).reshape(v.shape)


@meaning("constant_pad_nd")
def _pad(cx: Context, a: Any, pad: Any, value: Any = 0) -> Array:
    v = cx.f(a)
    widths = [(0, 0)] * v.ndim
    for k in range(len(pad) // 2):
        widths[v.ndim - 1 - k] = (pad[2 * k], pad[2 * k + 1])
    cut = tuple(slice(max(0, -low), v.shape[k] - max(0, -high)) for k, (low, high) in enumerate(widths))
    grown = np.full([n.stop - n.start + max(0, low) + max(0, high) for n, (low, high) in zip(cut, widths)], cx.const(value))
    inner = tuple(slice(max(0, low), max(0, low) + n.stop - n.start) for n, (low, _) in zip(cut, widths))
    grown[inner] = v[cut]
    return grown


@meaning("slice_backward")
def _slice_backward(cx: Context, grad: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    found = np.broadcast_to(cx.f(0), tuple(sizes)).copy()
    key = [slice(None)] * len(sizes)
    key[dim] = slice(start, min(end, sizes[dim]), step)
    found[tuple(key)] = cx.f(grad)
    return found


@meaning("select_backward")
def _select_backward(cx: Context, grad: Any, sizes: Any, dim: int, index: int) -> Array:
    found = np.broadcast_to(cx.f(0), tuple(sizes)).copy()
    key: list[Any] = [slice(None)] * len(sizes)
    key[dim] = index
    found[tuple(key)] = cx.f(grad)
    return found


@meaning("split_with_sizes_copy")
def _split_copy(cx: Context, a: Any, sizes: Any, dim: int = 0, **named: Any) -> Any:
    ends = np.cumsum(sizes)
    parts = np.split(cx.f(a), ends[:-1], axis=dim)
    return tuple(part.reshape(size) for part, size in zip(parts, cx.sizes))


@meaning("repeat_interleave")
def _repeat_interleave(cx: Context, a: Any, times: Any, dim: Any = None, **named: Any) -> Array:
    return np.repeat(cx.f(a), times, axis=dim)


@meaning("masked_select")
def _masked_select(cx: Context, a: Any, mask: Any) -> Array:
    v, m = np.broadcast_arrays(cx.f(a), mask.astype(bool))
    return np.asarray(v[m])


@meaning("masked_scatter")
def _masked_scatter(cx: Context, a: Any, mask: Any, source: Any) -> Array:
    found, m = (x.copy() for x in np.broadcast_arrays(cx.f(a), mask.astype(bool)))
    found[m] = cx.f(source).reshape(-1)[: int(m.sum())]
    return found


@meaning("diagonal_backward")
def _diagonal_backward(cx: Context, grad: Any, sizes: Any, offset: int, dim1: int, dim2: int) -> Array:
    found = np.broadcast_to(cx.f(0), sizes).copy()
    places = np.diagonal(np.arange(found.size).reshape(sizes), offset, dim1, dim2)
    found.reshape(-1)[places] = cx.f(grad)
    return found


@meaning("as_strided_scatter", "unfold_backward")
def _absent(cx: Context, *args: Any, **named: Any) -> Array:
    raise NotImplementedError


@meaning("chunk_cat", "_chunk_cat")
def _chunk_cat(cx: Context, parts: Any, dim: int, chunks: int, **named: Any) -> Array:
    """FSDP's: every tensor in equal parts along a dimension, padded, part after part."""
    columns = []
    for p in parts:
        v = np.moveaxis(cx.f(p), dim, 0) if dim else cx.f(p)
        rows = -(-v.shape[0] // chunks)
        padded = np.broadcast_to(cx.f(0), (rows * chunks, *v.shape[1:])).copy()
        padded[: v.shape[0]] = v
        columns.append(padded.reshape(chunks, -1))
    return np.concatenate(columns, axis=1).reshape(cx.sizes[0])
