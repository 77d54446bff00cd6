from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from proctor.oracle import sharding
from proctor.oracle.sharding import register, registry, strategy


def held(name: str, extent: int, parts: int, *options: int) -> list[list[int]]:
    cut = strategy(name).cut
    return [np.r_[tuple(np.arange(extent)[s] for s in cut(extent, parts, i, options))].tolist() for i in range(parts)]


@pytest.mark.parametrize(("extent", "parts"), list(itertools.product(range(12), range(1, 6))))
def test_chunk_and_balanced_are_torch_chunk_and_tensor_split(extent: int, parts: int) -> None:
    torch = pytest.importorskip("torch")
    chunks = [c.tolist() for c in torch.arange(extent).chunk(parts)]
    assert held("chunk", extent, parts) == (chunks + [[]] * parts)[:parts] if extent else [[]] * parts
    assert held("balanced", extent, parts) == [c.tolist() for c in torch.arange(extent).tensor_split(parts)]


def test_uneven_takes_sizes_or_shares() -> None:
    assert held("uneven", 8, 2, 3, 5) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert held("uneven", 8, 3, 1, 0, 3) == [[0, 1], [], [2, 3, 4, 5, 6, 7]]
    for options in ((1, 2), (1,), (), (0, 0)):
        with pytest.raises(ValueError, match="size"):
            held("uneven", 8, 2, *options)


def test_interleaved_cuts_every_group() -> None:
    assert held("interleaved", 12, 2, 3) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert held("interleaved", 8, 2, 2, 1, 1) == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert held("interleaved", 16, 2, 2, 1, 1)[0] == [0, 1, 2, 3, 8, 9, 12, 13]
    for options in ((), (0,), (3, 2)):
        with pytest.raises(ValueError, match=r"interleaved|divide"):
            held("interleaved", 8, 2, *options)


def test_interleaved_is_how_megatron_cuts_with_a_stride() -> None:
    # megatron.core.tensor_parallel.layers._initialize_affine_weight_cpu
    world, stride, master = 2, 3, np.arange(24)
    pieces = np.split(master, world * stride)
    assert held("interleaved", 24, world, stride) == [np.concatenate(pieces[r::world]).tolist() for r in range(world)]


def test_striped_deals_the_sequence_out() -> None:
    assert held("striped", 8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert held("striped", 6, 2, 1) == [[0, 2, 4], [1, 3, 5]]
    assert held("striped", 7, 2, 2) == [[0, 1, 4, 5], [2, 3, 6]]
    with pytest.raises(ValueError, match="stripe"):
        held("striped", 8, 2, 0)


def test_partial_does_not_cut() -> None:
    assert held("partial", 3, 2) == [[0, 1, 2]] * 2
    assert {s.reduction for s in registry().values()} == {"", "sum", "avg", "max", "min"}


@pytest.mark.parametrize("name", ["chunk", "balanced", "partial"])
def test_options_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="options"):
        held(name, 4, 2, 1)


def test_a_new_strategy_is_one_function_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mirrored.py").write_text(
        "from proctor.oracle.sharding import register\n"
        "@register('mirrored')\n"
        "def mirrored(extent, parts, index, options):\n"
        "    size = extent // parts\n"
        "    return [slice(extent - (index + 1) * size, extent - index * size)]\n"
    )
    monkeypatch.setattr(sharding, "__path__", [*sharding.__path__, str(tmp_path)])
    sharding._load.cache_clear()
    try:
        assert held("mirrored", 4, 2) == [[2, 3], [0, 1]]
    finally:
        sharding._REGISTRY.pop("mirrored", None)
        sharding._load.cache_clear()
    with pytest.raises(ValueError, match="no sharding strategy; there are balanced, chunk"):
        strategy("mirrored")


def test_registering_returns_the_function() -> None:
    def nothing(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
        return []

    try:
        assert register("nothing")(nothing) is nothing
    finally:
        sharding._REGISTRY.pop("nothing")
