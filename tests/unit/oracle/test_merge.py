from __future__ import annotations

import numpy as np
import pytest

from proctor.errors import MappingError
from proctor.oracle import sharding
from proctor.oracle.merge import Shard, Span, merge, merge_spans
from proctor.oracle.mesh import Cut, Layout, Mesh

MESH = Mesh.parse("dp=2,tp=2")
TP0 = Layout((Cut("tp", "chunk", 0),))


def shards(values: list[np.ndarray], mesh: Mesh = MESH, dtype: str = "") -> list[Shard]:
    return [Shard(r, mesh.coords(r), v, dtype) for r, v in enumerate(values)]


def test_a_missing_all_reduce_is_named_by_its_axis() -> None:
    a, b = np.float32([1, 2]), np.float32([3, 4])
    (conflict,) = merge(shards([a, b, a, b]), Layout(), MESH).conflicts
    assert conflict.axis == "tp" and conflict.majority == () and conflict.minority == (0, 1, 2, 3)
    assert conflict.max_abs == 2.0
    assert conflict.rel == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    (conflict,) = merge(shards([a, a, b, b]), Layout(), MESH).conflicts
    assert conflict.axis == "dp"


def test_a_rank_gone_astray_is_named() -> None:
    a, b = np.float32([1, 2]), np.float32([1, 2.5])
    merged = merge(shards([a, a, b, a]), Layout(), MESH)
    (conflict,) = merged.conflicts
    assert conflict.minority == (2,) and conflict.majority == (0, 1, 3) and conflict.axis == "dp+tp"
    assert np.array_equal(merged.full, a)


def test_conflicts_of_all_parts_are_one_when_the_axis_is() -> None:
    values = [np.float32([r]) for r in range(4)]
    (conflict,) = merge(shards(values), TP0, MESH).conflicts
    assert conflict.axis == "dp" and conflict.ranks == (0, 1, 2, 3)


def test_nan_equals_nan_and_zero_is_not_minus_zero() -> None:
    nan = np.float32([np.nan, np.inf])
    assert not merge(shards([nan] * 4), Layout(), MESH).conflicts
    (conflict,) = merge(shards([np.float32([0.0])] * 3 + [np.float32([-0.0])]), Layout(), MESH).conflicts
    assert conflict.minority == (3,) and conflict.rel == 0.0
    (conflict,) = merge(shards([nan] * 3 + [np.float32([1, np.inf])]), Layout(), MESH).conflicts
    assert conflict.rel == np.inf


def test_bfloat16_travels_as_bits() -> None:
    one, two = np.full(2, 0x3F80, np.uint16), np.full(2, 0x4000, np.uint16)
    merged = merge(shards([one, two, one, two], dtype="bfloat16"), TP0, MESH)
    assert merged.full.tolist() == [0x3F80] * 2 + [0x4000] * 2
    summed = merge(shards([one, two, one, two], dtype="bfloat16"), Layout((Cut("tp", "partial"),)), MESH)
    assert summed.full.tolist() == [0x4040] * 2
    (conflict,) = merge(shards([one, one, two, one], dtype="bfloat16"), Layout(), MESH).conflicts
    assert conflict.max_abs == 1.0 and conflict.rel == 1.0


@pytest.mark.parametrize(("how", "value"), [("partial", 6.0), ("partial-avg", 3.0), ("partial-max", 5.0), ("partial-min", 1.0)])
def test_addends_are_combined(how: str, value: float) -> None:
    values = [np.float32([1.0]), np.float32([5.0])] * 2
    merged = merge(shards(values), Layout((Cut("tp", how),)), MESH)
    assert merged.full.tolist() == [value] and merged.full.dtype == np.float32 and not merged.conflicts
    values[3] = np.float32([6.0])
    (conflict,) = merge(shards(values), Layout((Cut("tp", how),)), MESH).conflicts
    assert conflict.ranks == (1, 3) and conflict.axis == "dp"


def test_sums_of_integers_and_of_no_dimension() -> None:
    values = [np.asarray(v, np.int64) for v in (1, 2, 1, 2)]
    assert merge(shards(values), Layout((Cut("tp", "partial"),)), MESH).full == 3


def test_a_layer_of_one_stage_is_whole_without_the_others() -> None:
    mesh = Mesh.parse("pp=2,tp=2")
    found = [Shard(r, mesh.coords(r), np.float32([r])) for r in (2, 3)]
    merged = merge(found, TP0, mesh)
    assert merged.absent == {"pp": (0,)} and merged.full.tolist() == [2, 3]


def test_a_missing_shard_is_named() -> None:
    found = shards([np.float32([r % 2]) for r in range(4)])
    with pytest.raises(MappingError, match=r"dp=1 tp=1 \(rank 3 of the mesh\)"):
        merge(found[:3], TP0, MESH)
    with pytest.raises(MappingError, match="tp=1"):
        merge([found[0], found[2]], TP0, MESH)
    loose = merge(found[:3], TP0, MESH, strict=False)
    assert loose.full.tolist() == [0, 1] and len(loose.holes) == 1
    loose = merge([found[0]], TP0, MESH, (2,), strict=False)
    assert loose.full.tolist() == [0, 0] and loose.holes == ["dp=0 tp=1 (rank 1 of the mesh)"]


def test_the_known_shape_is_held_against_the_shards() -> None:
    whole = [np.float32([1, 2])] * 4
    with pytest.raises(MappingError, match=r"make up \[4\], but the whole tensor is \[2\]") as caught:
        merge(shards(whole), TP0, MESH, (2,))
    assert "every rank holds the whole tensor" in caught.value.hint
    with pytest.raises(MappingError, match=r"\[2\], but the whole tensor is \[4\]"):
        merge(shards(whole), Layout(), MESH, (4,))


def test_padding_is_cut_off_where_the_plan_says_so() -> None:
    values = [np.float32([1, 2]), np.float32([3, 0])] * 2
    with pytest.raises(MappingError) as caught:
        merge(shards(values), TP0, MESH, (3,))
    assert "padded" in caught.value.hint
    assert merge(shards(values), Layout(TP0.cuts, padded=True), MESH, (3,)).full.tolist() == [1, 2, 3]
    with pytest.raises(MappingError):
        merge(shards(values), Layout(TP0.cuts, padded=True), MESH, (5,))


def test_shards_that_cannot_be_of_one_tensor_are_refused() -> None:
    a = np.float32([1])
    with pytest.raises(MappingError, match="two shards"):
        merge([Shard(0, {}, a), Shard(0, {}, a)], Layout(), Mesh())
    with pytest.raises(MappingError, match="different dtypes: float32, float64"):
        merge(shards([a, a, a, a.astype(np.float64)]), Layout(), MESH)
    with pytest.raises(MappingError, match="not on the mesh"):
        merge([Shard(0, {"tp": 2}, a)], Layout(), MESH)


def test_a_strategy_that_does_not_cover_the_tensor_once_is_told() -> None:
    @sharding.register("wrong")
    def wrong(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
        return [slice(0, extent // parts)]

    try:
        layout, values = Layout((Cut("tp", "wrong", 0),)), [np.ones(2, np.float32)] * 4
        with pytest.raises(MappingError, match="2 of 4 elements are held by no rank, the first is 2; 2 of 4 elements are held twice"):
            merge(shards(values), layout, MESH)
        merged = merge(shards(values), layout, MESH, strict=False)
        assert len(merged.overlaps) == 1 and merged.full.tolist() == [1, 1, 0, 0]
    finally:
        sharding._REGISTRY.pop("wrong")


def test_strided_parts_go_to_their_places() -> None:
    full = np.arange(4096, dtype=np.float32).reshape(2048, 2)
    layout = Layout((Cut("tp", "striped", 0, (1,)),))
    held = [full[layout.indices(full.shape, MESH, MESH.coords(r))[0]] for r in range(4)]
    assert np.array_equal(merge(shards(held), layout, MESH).full, full)


def test_flat_ranges_of_zero() -> None:
    full = np.arange(6, dtype=np.float32)
    merged = merge_spans([Span(4, 6, full[4:], 1), Span(0, 4, full[:4], 0), Span(6, 6, full[:0], 2)], 6)
    assert np.array_equal(merged.full, full)
    with pytest.raises(MappingError, match="elements 4:6 are missing"):
        merge_spans([Span(0, 4, full[:4], 0)], 6)
    with pytest.raises(MappingError, match="elements 2:4 are held twice"):
        merge_spans([Span(0, 4, full[:4], 0), Span(2, 6, full[2:], 1)], 6)
    with pytest.raises(MappingError, match=r"rank 3 holds elements 0:4 .6 values"):
        merge_spans([Span(0, 4, full, 3)], 6)
    with pytest.raises(MappingError, match="0:6 are missing"):
        merge_spans([], 6)
    (conflict,) = merge_spans([Span(0, 6, full, 0), Span(0, 6, full + 1, 1)], 6, axis="cp").conflicts
    assert conflict.axis == "cp" and conflict.ranks == (0, 1)
    assert merge_spans([], 0).full.shape == (0,)
