"""numbers/tiles.py, recording/fitted.py, judging/statistics.py: tensors as sums over tiles, and what five numbers say besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import record_ranks  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from proctor.errors import OracleError  # noqa: E402
from proctor.oracle import compare, trace, trace_reference  # noqa: E402
from proctor.oracle.collect.summaries import summarise  # noqa: E402
from proctor.oracle.judging.statistics import _off  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict  # noqa: E402
from proctor.oracle.numbers.tiles import QUANTUM, coarser, sketch, tiles_of  # noqa: E402

WIDE, HIDDEN, ROWS = 256, 256, 2


def quantised(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.round(np.random.default_rng(seed).normal(size=shape) / QUANTUM) * QUANTUM


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([256, 1024, 768, 100]), st.sampled_from([64, 256, 320]), st.sampled_from([1, 2, 4]), st.integers(0, 1), st.integers(0, 99))
def test_a_shard_has_the_sketch_that_its_part_of_the_whole_has(rows: int, columns: int, ranks: int, dim: int, seed: int) -> None:
    whole = quantised(seed, rows, columns)
    tile = tiles_of(whole.shape, "param")
    of_whole = sketch(whole, tile)
    parts = [np.ascontiguousarray(p) for p in np.split(whole, ranks, axis=dim)]
    own = tiles_of(parts[0].shape, "param")
    assert coarser(own, tile, parts[0].shape), "a shard has the whole's tiles, or finer ones"
    made = [sketch(sketch(p, own), tile, own) for p in parts]
    assert np.array_equal(np.concatenate(made, axis=dim), of_whole), "bit for bit, in whatever order it was summed"


@pytest.mark.parametrize("error", ["constant", "alternates", "one element", "half a tile", "random"])
def test_an_error_shows_at_its_size(error: str) -> None:
    d = np.zeros((64, 64))
    i = np.arange(64)
    d += {"constant": 1.0, "alternates": (-1.0) ** i, "half a tile": (i % 16 < 8) * 1.0, "one element": 0.0, "random": 0.0}[error]
    d[5, 7] += error == "one element"
    d += quantised(3, 64, 64) * (error == "random")
    shown = np.linalg.norm(sketch(d, (16, 16))) / np.linalg.norm(d)
    assert 0.5 < shown < 2.0


def test_rows_of_activations_stay_apart_and_torch_sums_as_numpy_does() -> None:
    x = torch.randn(6, 128, 256)
    kept, said = summarise(x, "output")
    assert said["tile"][0] == 1 and kept.shape == (6, 128 // said["tile"][1], 256 // said["tile"][2]) and said["of"] == "float32"
    assert np.array_equal(kept.numpy(), sketch(x.double().numpy(), said["tile"]))
    assert said["stats"] == pytest.approx([x.numel(), float(x.double().sum()), float(x.double().square().sum()), float(x.min()), float(x.max()), 0.0])
    small = torch.randn(6, 8)
    assert summarise(small, "output") == (small, {})


def test_what_is_not_finite_is_counted_and_takes_nothing_from_the_other_numbers() -> None:
    x = torch.ones(4096)
    x[7], x[900] = float("nan"), float("inf")
    _, said = summarise(x, "main_grad")
    assert said["stats"] == (4096.0, 4094.0, 4094.0, 1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("mine", "word"),
    [((100.0, 5.0, 121.0, -3.0, 3.0, 0.0), "norm"), ((100.0, 50.0, 100.0, -3.0, 3.0, 0.0), "mean"), ((100.0, 5.0, 100.0, -3.0, 9.0, 0.0), "greatest"), ((100.0, 5.0, 100.0, -3.0, 3.0, 2.0), "finite")],
)  # fmt: skip
def test_numbers_tell_what_cancels_in_the_sums(mine: tuple[float, ...], word: str) -> None:
    theirs = (100.0, 5.0, 100.0, -3.0, 3.0, 0.0)
    assert word in _off(mine, theirs, 0.1)[0]
    assert _off(theirs, theirs, 0.0) == ("", 0.0) and _off((100.0, 5.1, 100.2, -3.05, 3.05, 0.0), theirs, 0.1) == ("", 0.0)


class MLP(nn.Module):
    """Two layers, of which a rank has half of the hidden features; what comes back to the output is the same on both."""

    def __init__(self, rank: int | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(WIDE, HIDDEN, bias=False), act or nn.GELU(), nn.Linear(HIDDEN, WIDE, bias=False)
        if rank is not None:
            mine = slice(rank * HIDDEN // 2, (rank + 1) * HIDDEN // 2)
            self.up.weight = nn.Parameter(self.up.weight.detach()[mine].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach()[:, mine].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, spoil: Callable[[nn.Module], object] = lambda net: None) -> None:
    torch.manual_seed(1)
    x, back = torch.randn(ROWS, 64, WIDE), torch.randn(ROWS, 64, WIDE)
    net(x).backward(back)
    spoil(net)
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("statistics") / "reference"
    net = MLP()
    optimizer = sgd(net)
    trace_reference(lambda: train(net, optimizer), net, optimizer, out=out, samples=2, statistics=True)
    return out


def judged(reference: Path, out: Path, patch: pytest.MonkeyPatch, spoil: Callable[[nn.Module, int], object] = lambda net, rank: None, act: nn.Module | None = None) -> Verdict:
    def run(rank: int) -> tuple[Any, Callable[[], None]]:
        net = MLP(rank, act if rank else None)
        return net, lambda: train(net, sgd(net), lambda net: spoil(net, rank))

    return compare(reference, record_ranks(out, patch, run, statistics=True))


def test_shards_of_a_correct_run_are_put_together(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(reference, tmp_path / "c", monkeypatch)
    assert found.verdict == "equivalent", found.reason
    assert {t.name for t in found.tensors if t.kind == "main_grad" and t.verdict == "ok"} == {"up.weight", "down.weight"}
    assert any(n.startswith("statistics only") for n in found.notes) and any("cannot see" in text for text in found.unchecked)


def test_a_wrong_function_on_one_rank_is_found_where_it_is(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(reference, tmp_path / "c", monkeypatch, act=nn.GELU(approximate="tanh"))
    assert found.verdict == "different" and found.first is not None and found.first.name == "act"


def test_a_gradient_that_is_halved_on_one_rank_is_found(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(net: nn.Module, rank: int) -> None:
        if rank:
            net.down.weight.grad *= 0.5

    found = judged(reference, tmp_path / "c", monkeypatch, halve)
    assert found.verdict == "different" and found.first is not None and (found.first.kind, found.first.name) == ("main_grad", "down.weight")


def test_a_nan_in_one_element_is_found(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_one(net: nn.Module, rank: int) -> None:
        net.up.weight.grad[3, 4] = float("nan")

    found = judged(reference, tmp_path / "c", monkeypatch, break_one)
    assert found.first is not None and (found.first.kind, found.first.verdict) == ("main_grad", "nonfinite")


def test_a_recording_of_statistics_is_small(reference: Path, tmp_path: Path) -> None:
    net = MLP()
    with trace(net, tmp_path / "whole"):
        train(net, sgd(net))
    size = {out: sum(f.stat().st_size for f in (out / "runs" / "clean").rglob("*.safetensors")) for out in (reference, tmp_path / "whole")}
    assert size[reference] * 40 < size[tmp_path / "whole"]
    with pytest.raises(OracleError, match="only the reference was recorded with --statistics"):
        compare(reference, tmp_path / "whole")


def test_evaluations_are_compared_by_statistics_as_well(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))  # type: ignore[no-any-return]

    tokens = torch.arange(4 * 64).reshape(4, 64) % 256

    def work(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
        net(tokens).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            net.head.weight.mul_(scale)
            net(tokens)

    net = Words()
    optimizer = sgd(net)
    trace_reference(lambda: work(net, optimizer, 1.0), net, optimizer, out=tmp_path / "r", samples=2, statistics=True)
    for name, scale, word in (("same", 1.0, "equivalent"), ("other", 1.01, "different")):
        net = Words()
        with trace(net, tmp_path / name, statistics=True):
            work(net, sgd(net), scale)
        found = compare(tmp_path / "r", tmp_path / name)
        assert found.verdict == word, found.reason
        assert any(t.phase == "evaluation" and t.kind == "output" for t in found.tensors)
