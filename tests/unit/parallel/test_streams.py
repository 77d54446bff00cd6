"""Both streams: a shard's draw is the slice of the single device's tensor, and the next draw is that of the single device."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.errors import MappingError, OracleError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.intercept import placed
from proctor.oracle.parallel.streams import KINDS, Ident, stream
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPERATIONS = {
    "normal_": lambda s, d: torch.empty(s, dtype=d).normal_(1.0, 2.0),
    "uniform_": lambda s, d: torch.empty(s, dtype=d).uniform_(-1, 3),
    "randn": lambda s, d: torch.randn(s, dtype=d),
    "rand_like": lambda s, d: torch.rand_like(torch.empty(s, dtype=d)),
    "normal(tensor, float)": lambda s, d: torch.normal(torch.ones(s, dtype=d), 2.0),
    "normal(tensor, tensor)": lambda s, d: torch.normal(torch.ones(s, dtype=d), torch.full(s, 0.5, dtype=d)),
    "bernoulli_": lambda s, d: torch.empty(s, dtype=d).bernoulli_(0.3),
    "bernoulli(tensor)": lambda s, d: torch.bernoulli(torch.full(s, 0.25, dtype=d)),
    "exponential_": lambda s, d: torch.empty(s, dtype=d).exponential_(2.0),
    "geometric_": lambda s, d: torch.empty(s, dtype=d).geometric_(0.4),
    "cauchy_": lambda s, d: torch.empty(s, dtype=d).cauchy_(),
    "log_normal_": lambda s, d: torch.empty(s, dtype=d).log_normal_(0.0, 0.5),
    "random_": lambda s, d: torch.empty(s, dtype=d).random_(),
    "randint": lambda s, d: torch.randint(3, 77, s),
    "randint of 40 bits": lambda s, d: torch.randint(0, 2**40, s),
    "native_dropout": lambda s, d: torch.native_dropout(torch.ones(s, dtype=d), 0.3, True)[0],
}
CUTS = ("chunk", "balanced", "striped", "interleaved")


def drawn(kind, operation, box, dtype=torch.float32):
    source = stream(kind, 7)
    with placed(lambda tensor: (source, box, Ident("layer.weight", 2))):
        return operation(box.local, dtype), source


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 6)), draw(st.integers(10, 300)))
    mesh = Mesh(("a", "b"), draw(st.sampled_from([(1, 2), (1, 3), (2, 2), (2, 4)])))
    cuts = []
    for axis in draw(st.permutations(mesh.axes)):
        if draw(st.booleans()):
            kind = draw(st.sampled_from(CUTS))
            cuts.append(Cut(axis, kind, draw(st.integers(0, len(shape) - 1)), (2,) if kind == "interleaved" else ()))
    return shape, mesh, Layout(tuple(cuts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
@given(case=cases(), dtype=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=12)
def test_a_shard_draws_the_slice_of_one_device(kind, name, case, dtype):
    shape, mesh, layout = case
    whole, after = one_device(kind, OPERATIONS[name], shape, dtype)
    for rank in range(mesh.world):
        box = Box.of(shape, layout, mesh, mesh.coords(rank))
        found, source = drawn(kind, OPERATIONS[name], box, dtype)
        assert torch.equal(found, whole[np.ix_(*box.indices)]), f"rank {rank}: {layout}"
        if kind == "stock":
            assert torch.equal(torch.randn(3, generator=source.generator), after), "the next draw"


def one_device(kind, operation, shape, dtype):
    """The draw of the whole, by plain torch where the stream is torch's own; and what torch draws next."""
    if kind == "keyed":
        return drawn(kind, operation, Box.whole(shape), dtype)[0], None
    generator_state = torch.get_rng_state()
    torch.manual_seed(7)
    try:
        return operation(shape, dtype), torch.randn(3)
    finally:
        torch.set_rng_state(generator_state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_multinomial_of_cut_rows(kind, replacement, count):
    shape, mesh = (5, 6), Mesh(("a",), (4,))  # the last rank has no row
    p = torch.arange(1.0, 31.0).view(shape)
    whole, after = one_device(kind, lambda s, d: torch.multinomial(p, count, replacement), shape, torch.float32)
    for rank in range(4):
        box = Box.of(shape, Layout((Cut("a"),)), mesh, mesh.coords(rank))
        mine = p[torch.from_numpy(box.indices[0])]
        found, source = drawn(kind, lambda s, d, mine=mine: torch.multinomial(mine, count, replacement), box)
        assert torch.equal(found, whole[torch.from_numpy(box.indices[0])])
        assert kind == "keyed" or torch.equal(torch.randn(3, generator=source.generator), after)


def test_multinomial_of_cut_categories_is_refused():
    box = Box.of((4, 6), Layout((Cut("a", "chunk", 1),)), Mesh(("a",), (2,)), {"a": 0})
    with pytest.raises(MappingError, match="categories are cut"):
        drawn("keyed", lambda s, d: torch.multinomial(torch.ones(4, 3), 2), box)


@pytest.mark.parametrize("kind", KINDS)
def test_randperm_is_cut(kind):
    whole, after = one_device(kind, lambda s, d: torch.randperm(11), (11,), torch.int64)
    assert sorted(whole.tolist()) == list(range(11))
    for rank in range(2):
        box = Box.of((11,), Layout((Cut("a"),)), Mesh(("a",), (2,)), {"a": rank})
        found, source = drawn(kind, lambda s, d: _permuted(s), box)
        assert torch.equal(found, whole[torch.from_numpy(box.indices[0])])
        assert kind == "keyed" or torch.equal(torch.randn(3, generator=source.generator), after)


def _permuted(shape):
    return torch.ops.aten.randperm.generator_out(11, generator=None, out=torch.empty(shape, dtype=torch.int64))


def test_a_transposed_tensor_is_drawn_in_the_order_of_memory():
    def operation(shape, dtype):
        return F.dropout(torch.ones(shape[1], shape[0]).t(), 0.5)

    whole, after = one_device("stock", operation, (6, 8), torch.float32)
    for rank in range(2):
        box = Box.of((6, 8), Layout((Cut("a"),)), Mesh(("a",), (2,)), {"a": rank})
        found, source = drawn("stock", operation, box)
        assert torch.equal(found, whole[torch.from_numpy(box.indices[0])])
        assert torch.equal(torch.randn(3, generator=source.generator), after)


def test_large_shards_cross_windows(monkeypatch):
    from proctor.oracle.parallel.streams import stock

    monkeypatch.setattr(stock, "_WINDOW", 256)
    monkeypatch.setattr(stock, "_GAP", 40)
    for name in ("normal_", "uniform_"):
        whole, after = one_device("stock", OPERATIONS[name], (37, 61), torch.float32)
        for dim in (0, 1):
            for rank in range(4):
                box = Box.of((37, 61), Layout((Cut("a", "chunk", dim),)), Mesh(("a",), (4,)), {"a": rank})
                found, source = drawn("stock", OPERATIONS[name], box)
                assert torch.equal(found, whole[np.ix_(*box.indices)])
                assert torch.equal(torch.randn(3, generator=source.generator), after)


def test_keyed_values_are_of_their_distribution():
    def one(operation):
        return drawn("keyed", operation, Box.whole((40_000,)), torch.float64)[0].double()

    normal, uniform = one(OPERATIONS["randn"]), one(lambda s, d: torch.rand(s, dtype=d))
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02 and abs((normal**4).mean() - 3) < 0.2
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.005
    assert abs(one(OPERATIONS["bernoulli_"]).mean() - 0.3) < 0.01
    assert abs(one(OPERATIONS["exponential_"]).mean() - 0.5) < 0.02
    assert abs(one(OPERATIONS["geometric_"]).mean() - 2.5) < 0.05


def test_names_and_ordinals_are_streams_of_their_own():
    source, found = stream("keyed", 7), []
    for ident in (Ident("a"), Ident("a", 1), Ident("b")):
        with placed(lambda tensor, ident=ident: (source, Box.whole((8,)), ident)):
            found.append(torch.rand(8))
    assert len({tuple(f.tolist()) for f in found}) == 3


def test_an_unknown_stream_is_named():
    with pytest.raises(OracleError, match="'philox' is no stream"):
        stream("philox", 0)
