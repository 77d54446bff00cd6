from __future__ import annotations

import numpy as np
import pytest
from helpers.shards import joined

from proctor.errors import MappingError
from proctor.oracle.merging.merge import Conflict, Held, Shard, join
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

MESH = Mesh.parse("dp=2,tp=2")
TP0 = Layout((Cut("tp", "chunk", 0),))


def shards(values: list[np.ndarray], mesh: Mesh = MESH, dtype: str = "") -> list[Shard]:
    return [Shard(r, mesh.coords(r), v, dtype) for r, v in enumerate(values)]


def whole(values: list[np.ndarray], layout: Layout, shape: tuple[int, ...], dtype: str = "") -> np.ndarray:
    full, conflicts = joined(shards(values, dtype=dtype), layout, MESH, shape)
    assert full is not None and not conflicts
    return full


def conflict(values: list[np.ndarray], layout: Layout | None = None, shape: tuple[int, ...] = (2,), dtype: str = "") -> Conflict:
    (found,) = joined(shards(values, dtype=dtype), layout or Layout(), MESH, shape)[1]
    return found


def test_a_missing_all_reduce_is_named_by_its_axis() -> None:
    a, b = np.float32([1, 2]), np.float32([3, 4])
    found = conflict([a, b, a, b])
    assert found.axis == "tp" and found.majority == () and found.minority == (0, 1, 2, 3)
    assert found.max_abs == 2.0
    assert found.rel == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    assert conflict([a, a, b, b]).axis == "dp"


def test_a_rank_gone_astray_is_named() -> None:
    a, b = np.float32([1, 2]), np.float32([1, 2.5])
    full, (found,) = joined(shards([a, a, b, a]), Layout(), MESH, (2,))
    assert found.minority == (2,) and found.majority == (0, 1, 3) and found.axis == "dp+tp"
    assert full is not None and np.array_equal(full, a)


def test_conflicts_of_all_parts_are_one_when_the_axis_is() -> None:
    found = conflict([np.float32([r]) for r in range(4)], TP0)
    assert found.axis == "dp" and found.ranks == (0, 1, 2, 3)


def test_nan_equals_nan_and_zero_is_not_minus_zero() -> None:
    nan = np.float32([np.nan, np.inf])
    assert whole([nan] * 4, Layout(), (2,)).tobytes() == nan.tobytes()
    found = conflict([np.float32([0.0])] * 3 + [np.float32([-0.0])], shape=(1,))
    assert found.minority == (3,) and found.rel == 0.0
    assert conflict([nan] * 3 + [np.float32([1, np.inf])]).rel == np.inf


def test_bfloat16_travels_as_bits() -> None:
    one, two = np.full(2, 0x3F80, np.uint16), np.full(2, 0x4000, np.uint16)
    assert whole([one, two, one, two], TP0, (4,), "bfloat16").tolist() == [0x3F80] * 2 + [0x4000] * 2
    assert whole([one, two, one, two], Layout((Cut("tp", "partial"),)), (2,), "bfloat16").tolist() == [0x4040] * 2
    found = conflict([one, one, two, one], dtype="bfloat16")
    assert found.max_abs == 1.0 and found.rel == 1.0


@pytest.mark.parametrize(("how", "value"), [("partial", 6.0), ("partial-avg", 3.0), ("partial-max", 5.0), ("partial-min", 1.0)])
def test_addends_are_combined(how: str, value: float) -> None:
    values = [np.float32([1.0]), np.float32([5.0])] * 2
    full = whole(values, Layout((Cut("tp", how),)), (1,))
    assert full.tolist() == [value] and full.dtype == np.float32
    values[3] = np.float32([6.0])
    found = conflict(values, Layout((Cut("tp", how),)), (1,))
    assert found.ranks == (1, 3) and found.axis == "dp"


def test_sums_of_integers_and_of_no_dimension() -> None:
    assert whole([np.asarray(v, np.int64) for v in (1, 2, 1, 2)], Layout((Cut("tp", "partial"),)), ()) == 3


def test_addends_that_are_combined_in_two_ways_are_refused() -> None:
    with pytest.raises(MappingError, match="in two ways"):
        joined(shards([np.float32([r]) for r in range(4)]), Layout((Cut("tp", "partial"), Cut("dp", "partial-max"))), MESH, (1,))


def test_what_is_missing_or_held_twice_is_no_whole() -> None:
    values = [np.float32([r % 2]) for r in range(4)]
    assert joined(shards(values)[:3], TP0, MESH, (2,))[0] is not None  # the other replica is there
    assert joined(shards(values)[::2], TP0, MESH, (2,))[0] is None

    def row(start: int, stop: int) -> Held:
        return Held(Shard(start, {}, np.ones(stop - start, np.float32)), (np.arange(start, stop),))

    assert join([row(0, 2), row(2, 4)], (4,))[0] is not None
    assert join([row(0, 2), row(1, 4)], (4,))[0] is None
    assert join([row(0, 3), row(2, 3)], (4,))[0] is None  # as many elements as the whole has


def test_strided_parts_go_to_their_places() -> None:
    full = np.arange(4096, dtype=np.float32).reshape(2048, 2)
    layout = Layout((Cut("tp", "striped", 0, (1,)),))
    held = [full[layout.indices(full.shape, MESH, MESH.coords(r))[0]] for r in range(4)]
    assert np.array_equal(whole(held, layout, full.shape), full)
