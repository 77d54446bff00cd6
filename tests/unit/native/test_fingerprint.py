"""native/memory/fingerprint.cpp, its numpy twin and the torch adapter agree, see every change, and leave no trace."""

# More than 400 lines: every case runs for each instruction set, the twin and the adapter.
from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.instrument.observe import content
from proctor.instrument.observe import fingerprint as adapter
from proctor.instrument.observe import on_device as device_hash
from proctor.instrument.observe.content import CONSTANT, NONFINITE, UNHASHED, ZERO, Summary
from proctor.instrument.observe.fingerprint import (
    fingerprint,
    fingerprint_all,
    fingerprint_shard,
    glance_at,
)
from proctor.native.twins import fingerprint as twin

native = pytest.importorskip("proctor.native._native")
BACKENDS = native.fingerprint_backends()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
          torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint32,
          torch.uint64]  # fmt: skip


def random_bits(dtype: torch.dtype, n: int, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaN and infinity among them."""
    width = content.formats()[dtype][0]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2 if dtype is torch.bool else 256, n * width, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype) if n else torch.empty(0, dtype=dtype)


def buffer(t: torch.Tensor) -> tuple[int, int, int, int]:
    width, kind = content.formats()[t.dtype]
    return t.data_ptr(), t.numel() * width, width, kind


def on_device(t: torch.Tensor, start: int = 0) -> Summary:
    """The path of CUDA tensors, here on the CPU."""
    return device_hash.read_back([device_hash.on_device(t, [(t.numel(), 1)], start)])[0]


def same(a: tuple[int, float, int], b: tuple[int, float, int]) -> bool:
    norms = (math.isnan(a[1]) and math.isnan(b[1])) or a[1] == pytest.approx(b[1], rel=2e-6, abs=1e-300)
    return a[0] == b[0] and a[2] == b[2] and bool(norms)


def test_native_code_is_what_runs() -> None:
    if os.environ.get("PROCTOR_NATIVE") == "0":
        assert adapter._kernel is twin
    else:
        assert adapter._kernel is native
    assert native.fingerprint_backend() in BACKENDS
    assert twin.fingerprint_backend() == "python"


@pytest.mark.parametrize(("content", "fp"), [
    ([], 0), ([0], 0x484B8271B4220835), ([1, 2, 3], 0x3F83A328A65E27AB),
    ([k * 0x01234567 % 2**32 for k in range(700)], 0x6B6391420CC0B411),
])  # fmt: skip
def test_a_fingerprint_means_the_same_in_every_version(content: list[int], fp: int) -> None:
    # Traces and packs outlive a release: a change of keys is a change of TRACE_SCHEMA.
    assert fingerprint(torch.tensor(content, dtype=torch.int64).to(torch.uint32)).fp == fp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_implementations_agree(dtype: torch.dtype) -> None:
    whole = random_bits(dtype, 2100, seed=1)
    for n in [*range(40), 127, 511, 512, 513, 1023, 1024, 1025, 1999, 2000]:
        t = whole[n % 7 : n % 7 + n]
        expected = twin.fingerprint_buffer(*buffer(t))
        for simd in BACKENDS:
            assert same(native.fingerprint_buffer(*buffer(t), simd=simd), expected), (n, simd)
            assert native.fingerprint_buffer(*buffer(t), summary=False, simd=simd)[0] == expected[0]
        assert same(on_device(t), expected), n
        assert same(fingerprint(t), expected), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_starts_agree(dtype: torch.dtype) -> None:
    t = random_bits(dtype, 6 * 131, seed=2)
    words = max(1, content.formats()[dtype][0] // 4)
    for start in (0, 4, 500, 2**33 + 508, 2**63 + 12):
        expected = twin.fingerprint_buffer(*buffer(t), start, 6, 1000)
        for simd in BACKENDS:
            assert same(native.fingerprint_buffer(*buffer(t), start, 6, 1000, simd=simd), expected)
        runs = [(6, 1000 // words), (131, 1)]
        assert same(device_hash.read_back([device_hash.on_device(t, runs, start // words)])[0], expected)


def test_chunks_of_the_device_path_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_hash, "_CHUNK_WORDS", 1024)
    for dtype in (torch.float32, torch.complex128, torch.uint8):
        t = random_bits(dtype, 3 * 1667, seed=3)
        assert same(on_device(t, 77), fingerprint(t, 77))
        words = max(1, content.formats()[dtype][0] // 4)
        expected = native.fingerprint_buffer(*buffer(t), 8, 3, 2000 * words)
        assert same(device_hash.read_back([device_hash.on_device(t, [(3, 2000), (1667, 1)], 8 // words)])[0], expected)


@pytest.mark.parametrize("simd", BACKENDS)
def test_an_unaligned_address_changes_nothing(simd: str) -> None:
    room = torch.zeros(9000, dtype=torch.uint8)
    content = random_bits(torch.float32, 2000, seed=4)
    expected = native.fingerprint_buffer(*buffer(content), simd=simd)
    for shift in (0, 1, 2, 3, 5, 17, 33, 63):
        room[shift : shift + 8000] = content.view(torch.uint8)
        assert same(native.fingerprint_buffer(room.data_ptr() + shift, 8000, 4, 0, simd=simd), expected)


def test_many_is_each() -> None:
    tensors = [random_bits(d, n, seed=n) for d in DTYPES for n in (0, 1, 100, 5000)]
    columns = zip(*(buffer(t) for t in tensors))
    fps, norms, flags = native.fingerprint_many(*map(list, columns))
    assert (fps.dtype, norms.dtype, flags.dtype) == (np.uint64, np.float64, np.uint8)
    for t, got in zip(tensors, zip(fps.tolist(), norms.tolist(), flags.tolist())):
        assert same(got, native.fingerprint_buffer(*buffer(t)))
    assert all(same(a, fingerprint(t)) for a, t in zip(fingerprint_all(tensors), tensors))
    assert native.fingerprint_many([], [], [], [])[0].size == 0
    assert fingerprint_all([]) == []


def test_a_buffer_that_does_not_divide_is_refused() -> None:
    t = torch.zeros(12)
    for module in (native, twin):
        for bad in [(t.data_ptr(), 47, 4, 0), (t.data_ptr(), 48, 3, 0), (0, 48, 4, 0), (t.data_ptr(), 48, 4, 0, 0, 5),
                    (t.data_ptr(), 48, 8, 0, 1), (t.data_ptr(), 48, 4, 0, 0, 0)]:  # fmt: skip
            with pytest.raises(ValueError, match=r"elem_bytes|rows"):
                module.fingerprint_buffer(*bad)
    with pytest.raises(ValueError, match="simd"):
        native.fingerprint_buffer(t.data_ptr(), 48, 4, 0, simd="sse")
    with pytest.raises(ValueError, match="length"):
        native.fingerprint_many([t.data_ptr()], [48], [4], [0, 0])


@pytest.mark.parametrize("simd", BACKENDS)
def test_the_environment_chooses_the_instruction_set(simd: str) -> None:
    code = "from proctor.native import _native; print(_native.fingerprint_backend())"
    for wanted, expected in ((simd, simd), ("nonsense", native.fingerprint_backends()[-1])):
        env = {**os.environ, "PROCTOR_SIMD": wanted}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == expected


# ---- the summary -----------------------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 15, 16, 600, 1555])
@pytest.mark.parametrize("path", [*BACKENDS, "python", "device"])
def test_flags_of_floats(dtype: torch.dtype, n: int, path: str) -> None:
    def flags(t: torch.Tensor) -> int:
        if path == "device":
            return on_device(t).flags
        if path == "python":
            return twin.fingerprint_buffer(*buffer(t))[2]
        return int(native.fingerprint_buffer(*buffer(t), simd=path)[2])

    def negate(t: torch.Tensor) -> None:  # torch negates complex zeros differently in vectors and in their tails
        (torch.view_as_real(t) if t.is_complex() else t).neg_()

    zeros = torch.zeros(n, dtype=dtype)
    assert flags(zeros) == ZERO | CONSTANT
    negative = zeros.clone()
    negate(negative)
    assert flags(negative) == ZERO | CONSTANT
    assert flags(torch.full((n,), 3, dtype=dtype)) == CONSTANT
    if n == 1:
        return
    for i in (0, n // 2, n - 1):
        t = zeros.clone()
        negate(t[i : i + 1])
        assert flags(t) == ZERO, "0.0 and -0.0 mixed: zero, but not of the same bits"
        for bad in (math.nan, math.inf, -math.inf):
            t[i] = bad
            assert flags(t) == NONFINITE
        t[i] = 1e-7
        assert flags(t) == 0


@pytest.mark.parametrize("simd", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-18, 1e-12, 1.0, 1e15, 1e25, 1e37])
def test_norm_neither_overflows_nor_vanishes(simd: str, dtype: torch.dtype, scale: float) -> None:
    t = (torch.randn(3001, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    t[::3] = 0
    _, norm, flags = native.fingerprint_buffer(*buffer(t), simd=simd)
    assert norm == pytest.approx(float(t.double().norm()), rel=2e-6)
    assert flags == 0


@pytest.mark.parametrize("path", [*BACKENDS, "device"])
def test_finite_doubles_whose_squares_overflow_are_finite(path: str) -> None:
    t = torch.full((1000,), 1e200, dtype=torch.float64)
    got = on_device(t) if path == "device" else native.fingerprint_buffer(*buffer(t), simd=path)
    assert got[1] == math.inf
    assert got[2] == CONSTANT


def test_a_complex_number_is_constant_as_a_whole() -> None:
    assert fingerprint(torch.full((700,), 1 + 2j)).flags == CONSTANT


def test_float8_has_no_norm() -> None:
    t = torch.ones(100).to(torch.float8_e4m3fn)
    assert math.isnan(fingerprint(t).norm)
    assert fingerprint(t).flags == CONSTANT


def test_empty_is_zero_and_constant() -> None:
    for t in (torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)):
        assert fingerprint(t) == fingerprint_all([t])[0] == on_device(t) == Summary(0, 0.0, ZERO | CONSTANT)


# ---- every change is seen --------------------------------------------------------------------------------------------

PER_FAMILY = 30_000
N = 4096  # eight blocks
SIGN = {np.uint32: 31, np.uint16: 15}
Edits = Iterator[tuple[tuple[int, ...], Callable[[np.ndarray], object]]]


def pairs(rng: random.Random) -> Iterator[tuple[int, int]]:
    while True:
        i, j = sorted(rng.sample(range(N), 2))
        yield i, j


def edits(family: str, base: np.ndarray, rng: random.Random) -> Edits:
    """(key that says which edit, function that applies it to a copy)."""
    bits = 8 * base.itemsize
    for i, j in pairs(rng):
        if family == "one-hot":
            value = rng.randrange(1, 1 << bits)
            yield (i, value), lambda a, i=i, v=value: a.__setitem__(i, v)
        elif family == "swap":
            if base[i] != base[j]:
                yield (i, j), lambda a, i=i, j=j: a.__setitem__([i, j], a[[j, i]])
        elif family == "two signs":
            yield (i, j), lambda a, i=i, j=j: a.__setitem__([i, j], a[[i, j]] ^ (1 << (bits - 1)))
        elif family == "ulp":
            si, sj = rng.choice((1, -1)), rng.choice((1, -1))
            yield (i, j, si, sj), lambda a, i=i, j=j, si=si, sj=sj: (
                a.__setitem__(i, (int(a[i]) + si) % (1 << bits)), a.__setitem__(j, (int(a[j]) + sj) % (1 << bits)))  # fmt: skip
        elif family == "rectangle":
            (r0, c0), (r1, c1) = divmod(i, 64), divmod(j, 64)
            if r0 != r1 and c0 != c1:
                at = [r0 * 64 + c0, r1 * 64 + c1, r0 * 64 + c1, r1 * 64 + c0]
                key = (min(r0, r1), max(r0, r1), min(c0, c1), max(c0, c1), int((r0 < r1) == (c0 < c1)))
                yield key, lambda a, at=at: (a.__setitem__(at[:2], a[at[:2]] + 1), a.__setitem__(at[2:], a[at[2:]] - 1))


@pytest.mark.parametrize("word", [np.uint32, np.uint16])
@pytest.mark.parametrize("family", ["one-hot", "swap", "two signs", "ulp", "rectangle"])
def test_no_two_edits_collide(family: str, word: type) -> None:
    base = np.random.default_rng(5).integers(2, (1 << (8 * np.dtype(word).itemsize)) - 2, N, dtype=word)
    if family == "one-hot":
        base[:] = 0
    seen: set[tuple[int, ...]] = set()
    found = {native.fingerprint_buffer(base.ctypes.data, base.nbytes, base.itemsize, 4)[0]}
    work = base.copy()
    for key, edit in edits(family, base, random.Random(6)):
        if key in seen:
            continue
        seen.add(key)
        edit(work)
        found.add(native.fingerprint_buffer(work.ctypes.data, work.nbytes, work.itemsize, 4, summary=False)[0])
        work[:] = base
        if len(seen) == PER_FAMILY:
            break
    assert len(found) == PER_FAMILY + 1


@pytest.mark.parametrize("word", [np.uint32, np.uint16])
def test_no_two_rolls_collide(word: type) -> None:
    base = np.random.default_rng(7).integers(0, 1 << 16, PER_FAMILY + 1, dtype=word)
    twice = np.concatenate([base, base])
    found = {
        native.fingerprint_buffer(twice.ctypes.data + k * base.itemsize, base.nbytes, base.itemsize, 4, summary=False)[0]
        for k in range(PER_FAMILY)
    }
    assert len(found) == PER_FAMILY


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, PER_FAMILY), (torch.int32, PER_FAMILY), (torch.bfloat16, 120)])
def test_no_two_constant_shifts_collide(dtype: torch.dtype, steps: int) -> None:
    shift = torch.arange(steps) if dtype is not torch.float32 else torch.arange(steps) / 1024
    found = {fingerprint(torch.zeros(256, dtype=dtype) + s.to(dtype)).fp for s in shift}
    assert len(found) == steps


def test_no_two_lengths_of_zeros_collide() -> None:
    assert len({fingerprint(torch.zeros(n)).fp for n in range(3000)}) == 3000


def test_keys_of_a_block_cannot_cancel_in_pairs() -> None:
    # A swap changes H by (T_i - T_j) dx, two equal steps by (T_i + T_j) dx; |dx| < 2^32 has at most 31 trailing zeros.
    lanes = twin.lane_keys()
    i, j = np.triu_indices(twin.LANES, 1)
    for key in (lanes[i] - lanes[j], lanes[i] + lanes[j]):
        assert (key & np.uint64(2**32 - 1) != 0).all()


# ---- the adapter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    t = random_bits(dtype, 24 * 35, seed=8).view(24, 35)
    for view in (t.t(), t[::2], t[:, 3:20], t[1:].unsqueeze(1), t[:1].expand(5, 35), t.view(4, 6, 35).permute(2, 0, 1)):
        copy = view.clone(memory_format=torch.contiguous_format)
        assert same(fingerprint(view), fingerprint(copy))
        assert same(fingerprint_all([view, copy])[0], fingerprint(copy))
        assert same(on_device(view), fingerprint(copy))


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.randn(50, dtype=torch.complex64)
    assert fingerprint(z.conj()).fp == fingerprint(z.conj().resolve_conj()).fp != fingerprint(z).fp
    negative = torch._neg_view(z.real.contiguous())
    assert fingerprint(negative).fp == fingerprint(negative.resolve_neg()).fp


def test_signed_zeros_differ() -> None:
    assert fingerprint(torch.tensor([0.0])).fp != fingerprint(torch.tensor([-0.0])).fp


def test_nothing_is_left_behind() -> None:
    p = torch.nn.Parameter(torch.randn(70, 30))
    q = p.t() * 2
    q.retain_grad()
    rng, versions, node = torch.get_rng_state(), (p._version, q._version), q.grad_fn
    fingerprint_all([p, q, p.t(), q.t()])
    fingerprint(q, start=9)
    on_device(q)
    assert torch.equal(rng, torch.get_rng_state())
    assert (p._version, q._version) == versions
    assert q.grad_fn is node
    assert torch.is_grad_enabled()
    q.sum().backward()
    assert torch.equal(p.grad, torch.full_like(p, 2))


def test_the_users_modes_see_nothing() -> None:
    seen: list[object] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    t = torch.randn(20, 30, requires_grad=True)
    transposed = t.t()
    with Functions(), Ops():
        fingerprint_all([t, transposed])
        fingerprint(transposed)
        fingerprint_shard(t, (40, 30), (20, 0))
        with content.no_torch_function():
            on_device(transposed)
    assert seen == []


def test_inference_mode_and_inference_tensors_work() -> None:
    with torch.inference_mode():
        t = torch.randn(10, 10)
        inside = fingerprint(t.t())
    assert fingerprint(t.t()) == inside


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_memory_is_unhashed() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = torch.nn.Parameter(torch.ones(1000))
    view = freed[100:200].detach()
    freed.untyped_storage().resize_(0)
    with FakeTensorMode() as mode:
        fake = torch.ones(4)
    wrapped: list[Summary] = []
    torch.func.vmap(lambda x: (wrapped.append(fingerprint(x)), x)[1])(torch.ones(3, 2))
    outside = [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), fake, freed, view,
               torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), torch.nn.UninitializedParameter()]  # fmt: skip
    with mode:
        assert fingerprint(torch.ones(3)).flags == UNHASHED
    for summary in [*fingerprint_all(outside), *map(fingerprint, outside), *wrapped]:
        assert (summary.fp, summary.flags) == (0, UNHASHED)
        assert math.isnan(summary.norm)


def test_subclasses_with_memory_are_read() -> None:
    class Mine(torch.nn.Parameter):
        pass

    t = torch.randn(33)
    assert fingerprint(Mine(t)) == fingerprint(t) == fingerprint_all([Mine(t)])[0]


def test_a_shard_outside_its_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="inside"):
        fingerprint_shard(torch.ones(3, 4), (6, 4), (4, 0))
    with pytest.raises(ValueError, match="rank"):
        fingerprint_shard(torch.ones(3), (6, 4), (0, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_agrees_with_cpu(dtype: torch.dtype) -> None:
    t = random_bits(dtype, 50_003, seed=9)
    assert same(fingerprint(t.cuda(), 5), fingerprint(t, 5))
    assert same(fingerprint_all([t.cuda(), t])[0], fingerprint(t))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_glance_at_a_device_waits_for_nobody() -> None:
    t = torch.randn(50_003).cuda()
    result = glance_at(t)
    torch.cuda.synchronize()
    assert result() == fingerprint(t)


def test_a_look_at_sixteen_places_sees_a_change_there() -> None:
    tensor = torch.zeros(1 << 10)
    first = adapter.look_at(tensor, 64)
    assert first is not None and first == adapter.look_at(tensor.clone(), 64)
    for place in (0, 541, 1023):
        changed = tensor.clone()
        changed[place] = 1
        assert adapter.look_at(changed, 64) != first, place
    beside = tensor.clone()
    beside[20] = 1
    assert adapter.look_at(beside, 64) == first, "of what lies between it says nothing"
    assert adapter.look_at(tensor[:4], 64) is adapter.look_at(tensor.view(2, -1).t(), 64) is None, "too small; not dense"
