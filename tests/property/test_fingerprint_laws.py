"""Laws of the fingerprint: parts add up to the whole, all implementations agree, one changed word is always seen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.instrument.observe import on_device as device_hash
from proctor.instrument.observe.content import collapse
from proctor.instrument.observe.fingerprint import fingerprint, fingerprint_shard, merge
from proctor.native.twins import fingerprint as twin

try:
    from proctor.native import _native as native
except ImportError:
    native = None

PATHS = [*(native.fingerprint_backends() if native else []), "python", "device"]
FORMATS = {torch.uint8: (1, 3), torch.bfloat16: (2, 1), torch.float16: (2, 0), torch.float32: (4, 0),
           torch.int64: (8, 2), torch.float64: (8, 0), torch.complex64: (8, 5), torch.complex128: (16, 5)}  # fmt: skip

dtypes = st.sampled_from(sorted(FORMATS, key=str))
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(0, 2000)
starts = st.one_of(st.integers(0, 2000), st.integers(2**31 - 600, 2**34), st.integers(2**61 - 3000, 2**61 - 2001))


def content(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, n * FORMATS[dtype][0], dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype) if n else torch.empty(0, dtype=dtype)


def fp(t: torch.Tensor, start: int, path: str) -> int:
    """Hash by one implementation; `start` in elements."""
    width, kind = FORMATS[t.dtype]
    if path == "device":
        return device_hash.read_back([device_hash.on_device(t, [(t.numel(), 1)], start)])[0].fp
    call: Any = twin if path == "python" else native
    options = {} if path == "python" else {"simd": path}
    args = (t.data_ptr(), t.numel() * width, width, kind, start * max(1, width // 4))
    return int(call.fingerprint_buffer(*args, **options)[0])


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=60)
@given(dtype=dtypes, n=lengths, seed=seeds, start=starts, data=st.data())
def test_any_partition_adds_up(path: str, dtype: torch.dtype, n: int, seed: int, start: int, data: st.DataObject) -> None:
    t = content(dtype, n, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=12)))
    parts = [fp(t[a:b], start + a, path) for a, b in itertools.pairwise([0, *cuts, n])]
    assert merge(parts) == fp(t, start, path)
    assert merge(reversed(parts)) == merge(parts)


@settings(deadline=None, max_examples=150)
@given(dtype=dtypes, n=lengths, seed=seeds, start=starts)
def test_all_implementations_agree(dtype: torch.dtype, n: int, seed: int, start: int) -> None:
    t = content(dtype, n, seed)
    assert len({fp(t, start, path) for path in PATHS}) == 1


@settings(deadline=None, max_examples=150)
@given(
    dtype=dtypes,
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=seeds,
    data=st.data(),
)
def test_rectangular_shards_add_up(dtype: torch.dtype, shape: list[int], seed: int, data: st.DataObject) -> None:
    """Each dimension is cut where it likes, as meshes with several sharded axes do."""
    whole = content(dtype, int(np.prod(shape)), seed).view(shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    parts, on_device = [], []
    for box in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        offsets = [a for a, _ in box]
        shard = whole[tuple(slice(a, b) for a, b in box)]
        parts.append(fingerprint_shard(shard, shape, offsets).fp)
        strides = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
        runs = collapse(shard.shape, strides)
        start = sum(o * s for o, s in zip(offsets, strides))
        on_device.append(device_hash.read_back([device_hash.on_device(shard, runs, start)])[0].fp)
    assert parts == on_device
    assert merge(parts) == fingerprint(whole).fp


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(64, 96, 8), (6, 700, 10), (3, 5, 1030)])
def test_shards_of_a_dimension_add_up(shape: tuple[int, int, int], dim: int) -> None:
    whole = torch.randn(shape)
    parts, at = [], [0, 0, 0]
    for shard in whole.chunk(4, dim):
        parts.append(fingerprint_shard(shard, shape, at))
        at[dim] += shard.shape[dim]
    assert merge(p.fp for p in parts) == fingerprint(whole).fp
    assert sum(p.norm**2 for p in parts) == pytest.approx(fingerprint(whole).norm ** 2, rel=1e-5)


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=100)
@given(dtype=dtypes, n=st.integers(1, 2000), seed=seeds, data=st.data())
def test_one_changed_byte_is_seen(path: str, dtype: torch.dtype, n: int, seed: int, data: st.DataObject) -> None:
    t = content(dtype, n, seed)
    before = fp(t, 0, path)
    raw = t.view(torch.uint8)
    i = data.draw(st.integers(0, raw.numel() - 1))
    raw[i] ^= data.draw(st.integers(1, 255))
    assert fp(t, 0, path) != before


@settings(deadline=None, max_examples=200)
@given(n=st.integers(2, 512), seed=seeds, data=st.data())
def test_a_swap_inside_a_block_is_seen(n: int, seed: int, data: st.DataObject) -> None:
    t = content(torch.float32, n, seed)
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    bits = t.view(torch.int32)
    before, differ = fingerprint(t).fp, bool(bits[i] != bits[j])
    bits[[i, j]] = bits[[j, i]]
    assert (fingerprint(t).fp != before) == differ
