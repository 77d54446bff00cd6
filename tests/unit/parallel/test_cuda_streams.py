"""Both streams on a GPU: their arithmetic here, by a twin of torch's operations; the rest where there is a GPU (marked `gpu`, not run so far)."""

import numpy as np
import pytest
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.draws import rule
from proctor.oracle.parallel.intercept import placed
from proctor.oracle.parallel.streams import Ident, cuda, philox, stream
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

SHAPES = [(64, 64), (7, 5), (37, 13), (3, 130), (515,)]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def boxes(shape, dim, parts):
    mesh = Mesh(("tp",), (parts,))
    return [Box.of(shape, Layout((Cut("tp", "chunk", dim),)), mesh, {"tp": at}) for at in range(parts)]


def twin(rows, keys, low=0.0, high=1.0):
    """`_philox_uniform_` by numpy: element i of a row has word i of its key from its position on, or two words."""
    for row, (seed, at) in zip(rows, keys[:, 0].tolist()):
        if rows.dtype == torch.float64:
            words = philox.words(seed, np.array([at // 2]), len(row), 2)[0].astype(np.uint64)
            row.copy_(torch.from_numpy(((words[:, 0] << np.uint64(32) | words[:, 1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53))
        else:
            row.copy_(torch.from_numpy((philox.words(seed, np.array([at]), len(row))[0, :, 0] & 0xFFFFFF).astype(np.float32) * 2.0**-24))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_shard_are_those_of_the_whole(monkeypatch, shape, double):
    class Operations:
        _philox_uniform_ = staticmethod(twin)

    monkeypatch.setattr(cuda.torch, "ops", type("Ops", (), {"aten": Operations}))
    device = torch.device("cpu")

    def drawn(box):
        out = torch.empty(box.local, dtype=torch.float64 if double else torch.float32).view(-1)
        runs = box.runs()
        for start, length, at in zip(*runs):
            out[at : at + length] = cuda.DeviceBits(2**63 + 5, np.array([start]), int(length), device).unit(double)
        return out.view(box.local)

    whole = drawn(Box.whole(shape))
    for dim in range(len(shape)):
        assert torch.equal(torch.cat([drawn(box) for box in boxes(shape, dim, 3)], dim), whole)
    several = cuda.DeviceBits(2**63 + 5, np.array([1, 6, 8]), 5, device).unit(double).view(3, 5)
    assert torch.equal(several, torch.stack([whole.view(-1)[at : at + 5] for at in (1, 6, 8)]))


@pytest.mark.parametrize(("processors", "resident"), [(1, 512), (3, 1536), (132, 2048)])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000, 70_001])
def test_an_elements_place_in_the_stream_is_that_of_torchs_kernel(size, processors, resident):
    """Against the loop of `distribution_elementwise_grid_stride_kernel`, written out."""
    grid = min(processors * (resident // 256), -(-size // 256))
    threads = cuda.threads_of(size, processors, resident)
    assert threads == 256 * grid
    found = np.full((size, 3), -1)
    rounded = ((size - 1) // (threads * 4) + 1) * threads * 4
    for turn, first in enumerate(range(0, rounded, threads * 4)):
        for component in range(4):
            at = np.arange(threads) + first + threads * component
            there = at < size
            found[at[there]] = np.stack([np.flatnonzero(there), np.full(there.sum(), turn), np.full(there.sum(), component)], 1)
    g = np.arange(size)
    assert (found == np.stack([g % threads, g // threads // 4, g // threads % 4], 1)).all()
    assert cuda.moved_on(size, threads) == 4 * (found[:, 1].max() + 1)


def test_what_has_no_rule_on_a_gpu_is_refused():
    with pytest.raises(OracleError, match=r"does not know how a GPU draws exponential_ \(torch.float32, 4 elements\)"):
        cuda.fill_stock(torch.Generator(), rule("exponential_"), torch.empty(4), Box.whole((4,)), (1.0,))


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("kind", ["keyed", "stock"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["normal_", "uniform_", "bernoulli_.float"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shards_are_those_of_one_gpu(self, shape, name, dtype, kind):
        args = (0.3,) if "bernoulli" in name else (0.5, 2.0)

        def drawn(box):
            torch.cuda.manual_seed(3)
            source = stream(kind, 3, torch.default_generator)
            with placed(lambda tensor: (source, box, Ident("x"))):
                out = getattr(torch.empty(box.local, dtype=dtype, device="cuda"), name.partition(".")[0])(*args)
            return out, torch.rand(5, device="cuda")

        whole, after = drawn(Box.whole(shape))
        if kind == "stock":
            torch.cuda.manual_seed(3)
            plain = getattr(torch.empty(shape, dtype=dtype, device="cuda"), name.partition(".")[0])(*args)
            assert torch.equal(whole, plain) and torch.equal(after, torch.rand(5, device="cuda"))
        for dim in range(len(shape)):
            parts = [drawn(box) for box in boxes(shape, dim, 3)]
            assert torch.equal(torch.cat([part for part, _ in parts], dim), whole)
            assert all(torch.equal(next_, after) for _, next_ in parts) or kind == "keyed"

    def test_dropout_and_double_numbers_of_the_keyed_stream(self):
        source = stream("keyed", 3)
        with placed(lambda tensor: (source, Box.whole(tuple(tensor.shape)), Ident("x"))):
            kept = torch.nn.functional.dropout(torch.ones(4096, device="cuda"), 0.25) > 0
            double = torch.rand(4096, device="cuda", dtype=torch.float64)
        assert 0.7 < kept.float().mean() < 0.8
        assert abs(double.mean() - 0.5) < 0.05 and double.unique().numel() == 4096
