"""oracle/judging/beginning.py, stages.py: what is cut wrongly is named, and what only a part of a model has is not held against the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to, record_ranks  # noqa: E402
from helpers.small_net import Net, batch, reference  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle.judging.blame import culprit  # noqa: E402


class Cut(nn.Module):
    """Columns of the first layer and rows of the last, of one rank; the other's addend is put in by hand."""

    def __init__(self, rank: int, first: slice) -> None:
        super().__init__()
        whole = Net()
        self.first, self.last = whole.first, whole.last
        with torch.no_grad():
            self.first.weight = nn.Parameter(whole.first.weight[first].clone())
            self.first.bias = nn.Parameter(whole.first.bias[slice(8 * rank, 8 * rank + 8)].clone())
            self.last.weight = nn.Parameter(whole.last.weight[:, 8 * rank : 8 * rank + 8].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.gelu(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_parameter_that_is_cut_wrongly_is_different_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    reference(tmp_path / "r")

    def run(rank: int) -> tuple[Any, Callable[[], None]]:
        first = slice(7, 15) if rank and wrong else slice(8 * rank, 8 * rank + 8)
        model = Cut(rank, first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            model(batch()).square().mean().backward()
            optimizer.step()

        return model, train

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == "different"  # the sum over ranks is missing either way
    named = {t.name for t in found.tensors if t.kind == "param"}
    assert named == ({"first.weight"} if wrong else set())
    blamed = culprit(found, found)
    assert blamed is not None and (not wrong or (blamed.module, blamed.direction) == ("first", "model"))


class Staged(nn.Module):
    """Four layers in a container, or the half of them that a stage has."""

    def __init__(self, keep: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        self.body = nn.Sequential(*layers[keep])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_a_containers_edges_count_only_where_a_stage_has_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference(tmp_path / "r", Staged())
    with torch.no_grad():
        between = Staged().body[:2](batch())

    def run(rank: int) -> tuple[Any, Callable[[], None]]:
        model = Staged(slice(2, 4) if rank else slice(0, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            if rank:
                model(between).square().mean().backward()
            else:  # the gradient that the next stage would send
                rest = Staged(slice(2, 4))
                cut = model(batch())
                inside = cut.detach().requires_grad_()
                rest.body[1](rest.body[0](inside)).square().mean().backward()
                cut.backward(inside.grad)
            optimizer.step()

        return model, train

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    assert not [t for t in found.tensors if t.verdict == "bad" and t.kind in ("input", "output")]
    assert found.verdict == "equivalent", found.reason
