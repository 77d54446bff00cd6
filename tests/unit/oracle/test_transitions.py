"""A transition that is one sum takes a short way; one that averages keeps the gradient's factor."""

from __future__ import annotations

import pytest
import torch

from proctor.oracle.parallel.crossing.transitions import Move
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

WHOLE, MESH = Layout(), Mesh(("tp",), (2,))


class Equal:
    """Rank 0 of two that hold the same."""

    mesh, rank, coords = MESH, 0, {"tp": 0}

    def all_reduce(self, tensor: torch.Tensor, axes: object, op: str = "sum") -> torch.Tensor:
        return tensor.mul_(2) if op == "sum" else tensor


@pytest.mark.parametrize(
    ("source", "back", "value", "gradient"),
    [("partial", None, 6.0, 1.0), (None, "partial", 3.0, 2.0), ("partial-avg", None, 3.0, 0.5), ("partial-avg", "partial", 3.0, 1.0)],
)
def test_value_and_gradient(source: str | None, back: str | None, value: float, gradient: float) -> None:
    def layout(name: str | None) -> Layout:
        return Layout((Cut("tp", name),)) if name else WHOLE

    move = Move((layout(source), WHOLE), (layout(back), WHOLE), Equal())  # type: ignore[arg-type]  # what a Move uses
    x = torch.full((3,), 3.0, requires_grad=True)
    y = move(x)
    y.sum().backward()
    assert y.tolist() == [value] * 3
    assert x.grad is not None and x.grad.tolist() == [gradient] * 3
