"""A transition that is one sum takes a short way; one that averages keeps the gradient's factor."""

from __future__ import annotations

import pytest
import torch

from proctor.oracle.parallel.comm import Processes, torchs_own
from proctor.oracle.parallel.crossing.transitions import Move
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

WHOLE, MESH = Layout(), Mesh(("tp",), (2,))


class Equal:
    """Rank 0 of two that hold the same."""

    mesh, rank, coords = MESH, 0, {"tp": 0}

    def all_reduce(self, tensor: torch.Tensor, axes: object, op: str = "sum") -> torch.Tensor:
        return tensor.mul_(2) if op == "sum" else tensor

    def add(self, tensor: torch.Tensor, axes: object) -> None:
        tensor.mul_(2)


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


def _copying() -> Move:
    return Move((WHOLE, WHOLE), (Layout((Cut("tp", "partial"),)), WHOLE), Equal())  # type: ignore[arg-type]


def test_writing_into_what_entered_is_an_error_and_never_a_gradient_that_nobody_sums() -> None:
    x = torch.full((3,), 3.0, requires_grad=True)
    y = _copying()(x * 1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.mul_(5)


def test_what_leaves_as_a_sum_may_be_written_into() -> None:
    x = torch.full((3,), 3.0, requires_grad=True)
    move = Move((Layout((Cut("tp", "partial"),)), WHOLE), (WHOLE, WHOLE), Equal())  # type: ignore[arg-type]
    y = move(x.sigmoid())
    y.mul_(5)
    y.sum().backward()
    s = torch.full((3,), 3.0).sigmoid()
    assert torch.equal(y.detach(), 10 * s)
    assert x.grad is not None and torch.allclose(x.grad, 5 * s * (1 - s))  # the sigmoid's output is what it was, for its backward


def test_a_gradient_that_is_not_there_counts_as_zeros_for_the_others() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> None:
            return None

    x = torch.full((3,), 3.0, requires_grad=True)
    Nothing.apply(_copying()(x)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0] * 3


def test_a_sum_is_seen_by_whoever_stands_in_the_place_of_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen = []

    def watched(*args: object, **kwargs: object) -> object:
        seen.append(args[0])
        return torchs(*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        comm = Processes(MESH)
        comm.add(torch.ones(3), ("tp",))
        torchs = dist.all_reduce
        assert torchs_own(torchs) and not torchs_own(watched)
        monkeypatch.setattr(dist, "all_reduce", watched)
        comm.add(torch.ones(3), ("tp",))
        assert len(seen) == 1
        monkeypatch.undo()
        comm.add(torch.ones(3), ("tp",))
        assert len(seen) == 1
    finally:
        dist.destroy_process_group()
