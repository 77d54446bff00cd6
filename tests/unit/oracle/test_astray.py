"""Fused projections with unequal parts, layers that are cut otherwise than the others, and values that some ranks have and others not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to, record_ranks  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace_reference  # noqa: E402
from proctor.oracle.judging.blame import culprit  # noqa: E402
from proctor.oracle.judging.tensor_judge import TensorJudge  # noqa: E402
from proctor.oracle.judging.verdicts import ASTRAY  # noqa: E402
from proctor.oracle.merging.assemble import Piece  # noqa: E402
from proctor.oracle.merging.reference import Reference  # noqa: E402
from proctor.oracle.numbers.difference import compare  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402

PARTS = (16, 8, 8)


class Fused(nn.Module):
    """Projections of queries, keys and values in one; `cut` says how a rank's rows are taken."""

    def __init__(self, cuts: tuple[str, ...] = (), rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        for layer, cut in zip(self.layers, cuts, strict=False):
            for name in ("weight", "bias"):
                whole = getattr(layer, name).detach()
                part = whole.chunk(2)[rank] if cut == "in one" else torch.cat([p.chunk(2)[rank] for p in whole.split(PARTS)])
                setattr(layer, name, nn.Parameter(part.clone()))

    def forward(self, x: Any) -> list[Any]:
        return [layer(x) for layer in self.layers]


def once(model: nn.Module, *inputs: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        sum(out.square().sum() for out in model(*inputs)).backward()
        optimizer.step()

    return train


@pytest.mark.parametrize("cuts", [("by part", "by part"), ("by part", "in one"), ("in one", "by part")])
def test_unequal_parts_of_a_fused_projection_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    x, whole = torch.randn(4, 8), Fused()
    trace_reference(once(whole, x), whole, out=tmp_path / "r", samples=2)

    def run(rank: int) -> tuple[nn.Module, Callable[[], None]]:
        model = Fused(cuts, rank)
        return model, once(model, x)

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == "equivalent", found.reason
    assert {"layers.0", "layers.1"} <= {t.name for t in found.tensors if t.kind == "output" and t.verdict == "ok"}


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.last = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, where: Any) -> list[Any]:
        return [self.last(self.place(where))]


class Scaled(nn.Module):
    """A value without parameters that every rank makes for itself."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = Table(scale), nn.Linear(8, 8)

    def forward(self, x: Any) -> list[Any]:
        return [self.last(x * self.table(x))]


class Table(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return torch.linspace(1, 2, 8) * self.scale


@pytest.mark.parametrize(("kind", "module"), [("positions", ""), ("half", ""), ("table", "table")])
def test_where_one_rank_has_not_what_the_reference_has_the_runs_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str) -> None:
    def program(rank: int | None) -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(1)
        if kind != "table":
            model: nn.Module = Placed()
            return model, once(model, torch.arange(12) if rank is None else torch.arange(6))  # each rank begins at nought, or there is none for the rest
        model = Scaled(1.1 if rank else 1.0)
        x = torch.randn(4, 8)
        return model, once(model, x if rank is None else x.chunk(2)[rank])

    whole, train = program(None)
    trace_reference(train, whole, out=tmp_path / "r", samples=2)
    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, program, world=1 if kind == "half" else 2))
    assert found.verdict == "different" and found.first is not None
    assert (found.first.name, found.first.layout) == (module, ASTRAY), found.first
    named = culprit(found, found)
    assert named is not None and (named.module, named.direction) == (module, "forward")


@pytest.mark.parametrize("spread", [True, False])
def test_an_error_in_one_element_has_the_tolerance_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: bool) -> None:
    """A cancelling sum in one element of a bias is rounded otherwise; noise of a few samples tells little of one number."""
    torch.manual_seed(1)
    x, model = torch.randn(4, 8), Scaled(1.0)
    trace_reference(once(model, x), model, out=tmp_path / "r", samples=4)
    trusted = Reference(Recording(tmp_path / "r"))
    key = (0, 0, "main_grad", "last.bias", "")
    values = trusted.array(trusted.entries[key])
    allowed = trusted.tolerance(key, compare(values, values, "float32"), "all").absolute

    def run(rank: int) -> tuple[nn.Module, Callable[[], None]]:
        other = Scaled(1.0)
        error = torch.full((8,), 8**-0.5) if spread else torch.eye(8)[3]
        other.last.bias.register_hook(lambda g: g + error * 1.5 * allowed)
        return other, once(other, x)

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run, world=1))
    wrong = [t.name for t in found.tensors if t.kind == "main_grad" and t.verdict == "bad"]
    assert wrong == (["last.bias"] if spread else [])


class Branches(nn.Module):
    """Two branches, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, way: int) -> list[Any]:
        return [(self.b if way else self.a)(x)]


def test_where_a_rank_does_not_call_a_module_the_runs_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, whole = torch.randn(4, 8), Branches()
    trace_reference(once(whole, x, 0), whole, out=tmp_path / "r", samples=2)

    def run(rank: int) -> tuple[nn.Module, Callable[[], None]]:
        model = Branches()
        return model, once(model, x.chunk(2)[rank], rank)

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == "different" and found.first is not None and (found.first.name, found.first.layout) == ("a", ASTRAY)


@pytest.mark.parametrize(("others", "lost"), [(0, True), (1, False)])
def test_a_part_of_which_a_rank_holds_something_that_nobody_can_place_is_not_lost(others: int, lost: bool) -> None:
    whole = np.arange(32.0).reshape(8, 4)
    entry = SimpleNamespace(dtype="float64", placement=None)
    piece: Any = Piece(0, entry, (np.arange(4), np.arange(4)), "0:0/2", firm=True)  # type: ignore[arg-type]
    key = (0, 0, "input", "", "")
    held = SimpleNamespace(values=lambda p: whole[:4], pieces={key: [(rank, entry) for rank in range(1 + others)]})
    judge = SimpleNamespace(reference=SimpleNamespace(entries={key: entry}, floats=lambda e: whole), assembler=held, ranks={0: None, 1: None})
    assert TensorJudge._lost(judge, [piece], key) is lost  # type: ignore[arg-type]
