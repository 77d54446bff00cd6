"""Laws of the mapping between shards and whole tensors, over any mesh of up to 16 ranks, any layout, any shape."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.shards import joined
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proctor.errors import MappingError, OracleError
from proctor.oracle.merging.merge import Held, Shard, join
from proctor.oracle.numbers.dtypes import as_float, from_float
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import _toml, format_plan, parse_plan
from proctor.oracle.sharding import registry

CUTS = [name for name, strategy in registry().items() if not strategy.reduction]
AXES = ("pp", "dp", "cp", "tp")


@dataclass
class Case:
    mesh: Mesh
    layout: Layout
    full: np.ndarray

    def shards(self) -> list[Shard]:
        found = []
        for rank in range(self.mesh.world):
            coords = self.mesh.coords(rank)
            held = self.layout.indices(self.full.shape, self.mesh, coords)
            found.append(Shard(rank, coords, self.full[np.ix_(*held)] if held else self.full.copy()))
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 16))
    mesh = Mesh(AXES[: len(sizes)], tuple(sizes))
    shape = draw(st.lists(st.integers(0, 13), min_size=0, max_size=3))
    cuts: list[Cut] = []
    for axis in draw(st.permutations(mesh.axes)) if shape else []:
        name = draw(st.sampled_from(["", *CUTS]))
        if not name:
            continue
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        cuts.append(Cut(axis, name, dim, draw(options(name, mesh.size(axis)))))
    layout = Layout(tuple(cuts))
    # Stated sizes must fit what the outer cuts leave.
    for at in range(mesh.world):
        try:
            layout.indices(shape, mesh, mesh.coords(at))
        except MappingError:
            assume(False)
    full = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    return Case(mesh, layout, full)


@st.composite
def options(draw: st.DrawFn, name: str, parts: int) -> tuple[int, ...]:
    if name == "uneven":
        return tuple(draw(st.lists(st.integers(0, 3), min_size=parts, max_size=parts)))
    if name == "interleaved":
        return tuple(draw(st.one_of(st.lists(st.integers(1, 4), min_size=1, max_size=1), st.lists(st.integers(0, 3), min_size=2, max_size=3))))
    if name == "striped":
        return tuple(draw(st.lists(st.integers(1, 4), max_size=1)))
    return ()


@settings(max_examples=150, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_slices_merge_to_the_whole_in_any_order(case: Case, chance: random.Random) -> None:
    shards = case.shards()
    chance.shuffle(shards)
    full, conflicts = joined(shards, case.layout, case.mesh, case.full.shape)
    assert full is not None and full.tobytes() == case.full.tobytes()
    assert not conflicts


@settings(max_examples=100, deadline=None)
@given(cases())
def test_ranks_cover_the_whole_as_often_as_they_replicate_it(case: Case) -> None:
    count = np.zeros(case.full.shape, int)
    for rank in range(case.mesh.world):
        held = case.layout.indices(case.full.shape, case.mesh, case.mesh.coords(rank))
        count[np.ix_(*held) if held else ()] += 1
    replicas = case.mesh.world // int(np.prod([case.mesh.size(c.axis) for c in case.layout.cuts], dtype=int))
    assert (count == replicas).all()


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_one_changed_bit_names_the_rank_or_changes_the_whole(case: Case, data: st.DataObject) -> None:
    shards = case.shards()
    victims = [s for s in shards if s.array.size]
    assume(victims)
    victim = data.draw(st.sampled_from(victims))
    bits = victim.array.reshape(-1).view(np.uint32)
    bits[data.draw(st.integers(0, bits.size - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    full, conflicts = joined(shards, case.layout, case.mesh, case.full.shape)
    assert full is not None
    cut = {c.axis for c in case.layout.cuts}
    loose = [a for a in case.mesh.axes if a not in cut and case.mesh.size(a) > 1]
    copies = int(np.prod([case.mesh.size(a) for a in loose], dtype=int))
    if copies == 1:
        assert not conflicts
        assert full.tobytes() != case.full.tobytes()
        return
    (conflict,) = conflicts
    assert victim.rank in conflict.minority
    assert conflict.axis == "+".join(loose)
    if copies > 2:
        assert conflict.minority == (victim.rank,)
        assert len(conflict.majority) == copies - 1
        assert full.tobytes() == case.full.tobytes()
    else:
        assert conflict.minority == conflict.ranks
        assert not conflict.majority


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_a_part_that_is_missing_leaves_no_whole(case: Case, data: st.DataObject) -> None:
    shards = case.shards()
    lost = shards.pop(data.draw(st.integers(0, len(shards) - 1)))
    assume(shards)
    cut = [c.axis for c in case.layout.cuts]
    alike = any(all(s.coords[a] == lost.coords[a] for a in cut) for s in shards)
    assert (joined(shards, case.layout, case.mesh, case.full.shape)[0] is not None) == (alike or not lost.array.size)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 5), min_size=1, max_size=2), st.integers(0, 99))
def test_addends_sum_to_the_whole(tp: int, dp: int, shape: list[int], seed: int) -> None:
    rng, mesh = np.random.default_rng(seed), Mesh(("dp", "tp"), (dp, tp))
    addends = [rng.integers(-8, 8, shape).astype(np.float32) for _ in range(tp)]
    layout = Layout((Cut("tp", "partial"), Cut("dp", "chunk", 0)))
    shards = [
        Shard(r, mesh.coords(r), addends[mesh.coords(r)["tp"]][np.ix_(*layout.indices(shape, mesh, mesh.coords(r)))])
        for r in range(mesh.world)
    ]
    full, conflicts = joined(shards, layout, mesh, shape)
    assert full is not None and np.array_equal(full, sum(addends))
    assert not conflicts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 2), st.randoms(use_true_random=False))
def test_flat_ranges_make_up_the_parameter(sizes: list[int], copies: int, chance: random.Random) -> None:
    full, ends = np.arange(sum(sizes), dtype=np.float32), np.cumsum([0, *sizes]).tolist()
    held = [Held(Shard(r, {}, full[a:b]), (np.arange(a, b),)) for c in range(copies) for r, (a, b) in enumerate(itertools.pairwise(ends), c * 10)]
    chance.shuffle(held)
    assert np.array_equal(join(held, full.shape)[0], full)
    rest = [h for h in held if h.places[0].tobytes() != held[0].places[0].tobytes()]
    assert not rest or (join(rest, full.shape)[0] is None) == bool(held[0].shard.array.size)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]), st.data())
def test_rounding_back_what_a_format_holds_changes_nothing(dtype: str, data: st.DataObject) -> None:
    wide = dtype in ("bfloat16", "float16")
    codes = np.array(data.draw(st.lists(st.integers(0, 0xFFFF if wide else 0xFF), max_size=40)), np.uint16 if wide else np.uint8)
    stored = codes.view(np.float16) if dtype == "float16" else codes
    values = as_float(stored, dtype)
    back = from_float(values.astype(np.float64), dtype)
    assert np.array_equal(back.view(codes.dtype)[~np.isnan(values)], codes[~np.isnan(values)])
    assert np.isnan(as_float(back, dtype)[np.isnan(values)]).all()


WORDS = st.sampled_from([*"param activation rename mesh path module shard dims partial replicate output input layout".split(),
                         *"from to where kind axes sizes groups schema padded slot tp dp tp+dp 0 -1 x".split()])  # fmt: skip
LEAVES = st.one_of(
    WORDS,
    st.sampled_from(["interleaved:0:3", "uneven:0:[1,2]", "striped:99", "partial", "sbh->bsh", r"(\d+)", "{g1+pp}", "("]),
    st.integers(-(2**62), 2**62), st.booleans(), st.floats(allow_nan=True), st.text(max_size=4),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(WORDS, v, max_size=4)), max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_any_file_is_a_plan_or_an_error_of_one_line(table: dict[str, object]) -> None:
    text = "\n".join(f"{_toml(key)} = {_toml(value)}" for key, value in table.items())
    said, plan = "", None
    try:
        plan = parse_plan(text)
    except OracleError as error:
        said = str(error)
    assert "\n" not in said
    if plan is None:
        return
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert format_plan(parse_plan(format_plan(plan))) == format_plan(plan) or not format_plan(plan)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_plan_are_an_error_of_ours(blob: bytes) -> None:
    with pytest.raises(OracleError):
        Plan.from_json(blob)
