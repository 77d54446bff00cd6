"""Each operator that wraps torch: where it applies, that it acts, and what then goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.mutants.registry import load

torch = pytest.importorskip("torch")
OPERATORS = {n: o for n, o in load("process").items() if o.kind == "process"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What operators wrap is put back."""
    import torch.utils.checkpoint

    holders = [
        torch, torch.nn.functional, torch.nn.utils, torch.nn.Module, torch.optim.Optimizer, torch.optim.SGD, torch.utils.checkpoint,
        torch.nn.parallel.DistributedDataParallel, torch.utils.data.DistributedSampler, torch.utils.data.dataloader._BaseDataLoaderIter,
    ]
    kept = [(holder, dict(vars(holder))) for holder in holders]
    yield
    for holder, names in kept:
        for name, value in vars(holder).copy().items():
            if name in names and names[name] is not value:
                setattr(holder, name, names[name])


class Planted:
    """Plants an operator, and counts how often it acts."""

    def __init__(self, name: str) -> None:
        self.count = 0
        plant = OPERATORS[name].plant
        assert plant is not None
        plant(torch, self._fire)

    def _fire(self) -> None:
        self.count += 1


def stepped(optimizer: Any, parameter: Any, times: int = 3) -> list[float]:
    values = []
    for _ in range(times):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        values.append(float(parameter.detach()[0]))
    return values


def test_every_operator_has_a_test() -> None:
    here = Path(__file__).read_text()
    assert [name for name in OPERATORS if f'"{name}"' not in here] == []


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_an_operator_applies_where_the_program_has_what_it_breaks(name: str) -> None:
    operator = OPERATORS[name]
    assert operator.applies(f"x = {operator.mentions[0]}", operator.ranks)
    assert not operator.applies("print('nothing trains here')", operator.ranks)
    assert not operator.applies(f"x = {operator.mentions[0]}", operator.ranks - 1)


def test_every_third_update_is_lost() -> None:
    planted = Planted("update_lost")
    parameter = torch.nn.Parameter(torch.ones(1))
    assert stepped(torch.optim.SGD([parameter], lr=0.5), parameter) == [0.5, 0.0, 0.0]
    assert planted.count == 1


def test_rank_one_skips_its_third_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    Planted("one_rank_skips")
    parameter = torch.nn.Parameter(torch.ones(1))
    assert stepped(torch.optim.SGD([parameter], lr=0.5), parameter, 4) == [0.5, 0.0, 0.0, -0.5]


def test_a_frozen_parameter_moves() -> None:
    Planted("frozen_parameter_moves")
    layer = torch.nn.Linear(1, 1)
    before = float(layer.weight.detach())
    layer.requires_grad_(False)
    parameter = torch.nn.Parameter(torch.ones(1))
    stepped(torch.optim.SGD([parameter], lr=0.5), parameter, 1)
    assert float(layer.weight.detach()) == pytest.approx(before * 1.01)


def test_a_gradient_is_lost_and_another_doubled() -> None:
    Planted("gradient_of_one_parameter_lost")
    parameter = torch.nn.Parameter(torch.ones(1))
    assert stepped(torch.optim.SGD([parameter], lr=0.5), parameter, 1) == [1.0]


def test_gradients_are_summed_over_ranks() -> None:
    Planted("gradient_scaled_by_ranks")
    parameter = torch.nn.Parameter(torch.ones(1))
    assert stepped(torch.optim.SGD([parameter], lr=0.25), parameter, 1) == [0.5]


def test_group_options_are_swapped_and_a_rate_changes_on_resume() -> None:
    Planted("group_options_swapped")
    Planted("resume_with_another_rate")
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": w} for w in (0.0, 0.3)]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 5.0


@pytest.mark.parametrize("name", ["gradients_not_reduced", "gradients_reduced_in_wrong_group", "ranks_begin_apart"])
def test_data_parallel_training_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group: the wrapper's own parts stand in."""
    ddp = torch.nn.parallel.DistributedDataParallel
    seen: list[Any] = []

    def init(self: Any, module: Any, process_group: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = module, True
        seen.append(process_group)

    monkeypatch.setattr(ddp, "__init__", init)
    monkeypatch.setattr(ddp, "forward", lambda self, x: seen.append(self.require_backward_grad_sync))
    for part, value in (("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, part, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks: ranks)
    planted = Planted(name)
    layer = torch.nn.Linear(1, 1)
    before = float(layer.weight.detach())
    ddp.forward(ddp(layer), torch.ones(1))
    assert planted.count == 1
    assert {
        "gradients_not_reduced": seen == [None, False],
        "gradients_reduced_in_wrong_group": seen == [[1], True],
        "ranks_begin_apart": float(layer.weight.detach()) == pytest.approx(before * 1.1),
    }[name]


def test_what_is_reduced_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    planted = Planted("reduced_copy_thrown_away")
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    assert float(tensor) == 1.0 and planted.count == 1


def test_shards_are_clipped_by_their_own_norm() -> None:
    Planted("clipped_by_own_norm")
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 8.0)
    assert float(torch.nn.utils.clip_grad_norm_([parameter], 2.0)) == 8.0
    assert float(parameter.grad) == pytest.approx(2.0)


@pytest.mark.parametrize(("name", "rank", "value"), [
    ("gradient_wrong_on_one_rank", 1, 0.75), ("gradient_wrong_on_one_rank", 0, 0.5), ("one_rank_with_another_rate", 1, 0.25), ("one_rank_with_another_rate", 0, 0.5),
])  # fmt: skip
def test_one_rank_updates_otherwise(name: str, rank: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    planted = Planted(name)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    assert stepped(optimizer, parameter, 1) == [value]
    assert planted.count == rank and optimizer.param_groups[0]["lr"] == 0.5


def test_samplers_give_the_same_slice_and_ignore_the_epoch() -> None:
    Planted("same_slice_on_every_rank")
    Planted("epoch_not_told")
    samplers = [torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=r) for r in range(2)]
    first = list(samplers[0])
    samplers[1].set_epoch(3)
    assert list(samplers[1]) == first
    assert samplers[1].rank == 1


def test_a_linear_layer_loses_digits() -> None:
    Planted("linear_in_half_precision")
    result = torch.nn.functional.linear(torch.full((1, 1), 1.001), torch.ones(1, 1))
    assert result.dtype == torch.float32 and float(result) == 1.0


def test_running_statistics_stay() -> None:
    Planted("running_statistics_not_written")
    norm = torch.nn.BatchNorm1d(2)
    norm(torch.randn(4, 2) + 5)
    assert norm.running_mean.tolist() == [0.0, 0.0]


def test_dropout_draws_one_mask() -> None:
    Planted("dropout_mask_repeated")
    x = torch.ones(64)
    first, second = (torch.nn.functional.dropout(x) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.nn.functional.dropout(x, training=False), x)


def test_recomputation_draws_anew() -> None:
    import torch.utils.checkpoint as module

    seen: dict[str, Any] = {}
    module.checkpoint = lambda *args, **kwargs: seen.update(kwargs)
    Planted("recomputed_with_other_randomness")
    module.checkpoint(abs, 1, use_reentrant=False)
    assert seen == {"use_reentrant": False, "preserve_rng_state": False}


def test_every_other_batch_comes_again() -> None:
    Planted("every_other_batch_comes_again")
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=1)
    assert [int(b) for b in loader] == [0, 0, 2, 2]


def test_clipping_measures_and_changes_nothing() -> None:
    Planted("clipping_without_effect")
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 8.0)
    assert float(torch.nn.utils.clip_grad_norm_([parameter], 1.0)) == 8.0
    assert float(parameter.grad) == 8.0


def test_a_checkpoint_is_stale(tmp_path: Path) -> None:
    Planted("stale_checkpoint")
    weight = torch.zeros(1)
    for i in range(2):
        weight += 1
        torch.save({"weight": weight}, tmp_path / f"{i}.pt")
    assert torch.load(tmp_path / "1.pt")["weight"].tolist() == [1.0]


def test_clearing_and_modes_do_nothing() -> None:
    Planted("zero_grad_without_effect")
    Planted("mode_without_effect")
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.5).zero_grad()
    assert parameter.grad is not None
    assert torch.nn.Dropout().eval().training
