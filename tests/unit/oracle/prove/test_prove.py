"""Parallel functions against their single-device form, on a fake process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.oracle.prove_cut import cut
from helpers.oracle.prove_programs import data_parallel, tensor_parallel, who

from proctor.errors import OracleError
from proctor.oracle.prove import assert_proved, prove


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_parallel_by_hand_is_proved(ranks: int) -> None:
    verdict = prove(tensor_parallel(), tensor_parallel(), f"tp={ranks}")
    assert verdict.verdict == "PROVED", str(verdict)
    assert verdict.outputs == ranks * 24 and not verdict.opaque


def test_data_parallel_with_clipping_is_proved() -> None:
    assert_proved(data_parallel(clip=True), data_parallel(clip=True), "dp=3")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_other_optimizers_are_proved(optimizer: type[torch.optim.Optimizer]) -> None:
    assert_proved(tensor_parallel(optimizer=optimizer), tensor_parallel(optimizer=optimizer), "tp=2")


@pytest.mark.parametrize(
    ("mistake", "module", "kind"),
    [
        ("forward missing", "first.down", "missing collective"),
        ("backward missing", "first.up", "missing collective"),
        ("average", "first", "wrong scale"),
        ("doubled", "first", "doubled"),
    ],
)
def test_a_wrong_collective_is_refuted_where_it_is(mistake: str, module: str, kind: str) -> None:
    verdict = prove(tensor_parallel(), tensor_parallel(mistake), "tp=2")
    assert verdict.verdict == "DIFFERENT" and verdict.exit_code == 1
    assert verdict.culprit is not None
    assert verdict.culprit.module.startswith(module), str(verdict)
    assert verdict.culprit.kind == kind, str(verdict)
    assert "prove_programs.py" in verdict.culprit.place or verdict.culprit.phase == "backward"
    assert verdict.examples


def test_a_shard_that_two_ranks_share_is_refuted() -> None:
    assert prove(tensor_parallel(), tensor_parallel("same shard"), "tp=2").verdict == "DIFFERENT"


def test_a_gradient_that_is_not_reduced_is_named() -> None:
    verdict = prove(data_parallel(), data_parallel("one not reduced"), "dp=2")
    assert verdict.verdict == "DIFFERENT"
    assert verdict.culprit is not None and verdict.culprit.module == "second.up", str(verdict)
    assert verdict.culprit.kind == "missing collective" and verdict.culprit.phase == "backward"


@pytest.mark.parametrize("many", [False, True])
def test_a_collective_that_does_not_fit_its_group_is_named(many: bool) -> None:
    def gathered() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        model(torch.randn(4, 4).chunk(world)[rank]).square().sum().backward()
        if world > 1:
            alone = dist.new_group([rank], use_local_synchronization=True)  # it should be all ranks
            assert model.weight.grad is not None
            dist.all_gather([torch.empty(2, 4), torch.empty(2, 4)], model.weight.grad[:2].clone(), group=alone)  # a fake group takes a list of any length
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    verdict = prove(gathered, gathered, "dp=2", many=many)
    assert verdict.verdict == "DIFFERENT" and verdict.culprit is not None, str(verdict)
    assert verdict.culprit.kind == "wrong group" and "for a group of 1" in verdict.culprit.said and "test_prove.py" in verdict.culprit.said


def test_a_sum_for_an_average_is_a_wrong_scale() -> None:
    verdict = prove(data_parallel(), data_parallel("sum"), "dp=2")
    assert verdict.verdict == "DIFFERENT" and "a factor of 2 everywhere" in verdict.examples[0]


def test_a_proof_out_of_budget_is_not_sold_as_one() -> None:
    verdict = prove(tensor_parallel(), tensor_parallel(), "tp=2", proof_s=1e-9)
    assert verdict.verdict == "EQUAL" and "out of budget" in verdict.why and verdict.probability > 0


def test_a_function_that_trains_nothing_is_one_line() -> None:
    with pytest.raises(OracleError, match="trains no torch module"):
        prove(lambda: None, tensor_parallel(), "tp=2")


def test_a_function_that_raises_is_one_line() -> None:
    def broken() -> None:
        raise ValueError("a world of 2 is refused")

    with pytest.raises(OracleError, match="rank 0 of 2: ValueError: a world of 2 is refused"):
        prove(tensor_parallel(), broken, "tp=2")


def test_a_layer_that_no_rank_holds_is_named() -> None:
    from torch import nn

    def stack(layers: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)][:layers])
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(6.0).view(2, 3)).sum().backward()
        update.step()

    verdict = prove(lambda: stack(4), lambda: stack(3), "pp=2")
    assert verdict.verdict == "DIFFERENT"
    assert verdict.culprit is not None and verdict.culprit.kind == "missing part" and verdict.culprit.module == "3", str(verdict)


@pytest.mark.parametrize("ranks", [2])
def test_softmax_norm_and_loss_over_cut_dimensions_are_proved(ranks: int) -> None:
    assert_proved(cut(), cut(), f"tp={ranks}")


def test_a_sum_of_exponentials_that_is_not_reduced_is_refuted() -> None:
    assert prove(cut(), cut("sum missing"), "tp=2").verdict == "DIFFERENT"


def test_a_routing_made_of_what_others_send_refutes_nothing() -> None:
    """A fake process group carries no numbers, so rows are picked that no run would pick; the ranks are right in earnest."""
    from torch import distributed as dist
    from torch import nn

    class Routed(nn.Module):
        def __init__(self, rank: int, world: int) -> None:
            super().__init__()
            self.columns = slice(rank * 4 // world, (rank + 1) * 4 // world)
            self.experts, self.router, self.world = nn.Parameter(torch.randn(3, 4)), torch.randn(4, 3), world

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = x[:, self.columns] @ self.router[self.columns]
            if self.world > 1:
                dist.all_reduce(gate)
            return self.experts[gate.argmax(-1)] * x

    def routed() -> None:
        torch.manual_seed(0)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        model = Routed(rank, world)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(24.0).sin().view(6, 4)).sum().backward()
        update.step()

    verdict = prove(routed, routed, "tp=2")
    assert verdict.verdict == "UNPROVED" and "does not carry" in verdict.why and f"{__file__}:" in verdict.why, str(verdict)
