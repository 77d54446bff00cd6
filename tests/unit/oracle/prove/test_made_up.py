"""Numbers that a fake process group does not carry lead to no verdict, and the collective that they come of is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.oracle.prove_programs import ROWS, WIDTH, data, who
from torch import nn

from proctor.oracle.prove import prove
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.tape import collective

LAST = 5  # rows that count in the loss: 3 and 2 on two ranks


def counted(how: str) -> Callable[[], None]:
    """Data parallel over rows, of which some do not count: the loss is divided by how many there are on all ranks."""

    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 3)
        x, target = data()
        target[LAST:] = -100
        x, target = x.chunk(world)[rank], target.chunk(world)[rank]
        count = (target >= 0).sum()
        if world > 1 and how.startswith("before"):
            dist.all_reduce(count)
        early: float = count.item() if how == "before, item" else count.tolist() if how == "before, tolist" else 0
        update = torch.optim.SGD(model.parameters(), lr=0.1)  # from here on all is recorded
        loss = nn.functional.cross_entropy(model(x), target, reduction="sum")
        if world > 1 and how.startswith("within"):
            dist.all_reduce(count)
        if how == "within, item":
            early = count.item()
        (loss / (early or count)).backward()
        for parameter in model.parameters():
            if world > 1:
                dist.all_reduce(parameter.grad)
        update.step()

    return train


@pytest.mark.parametrize("how", ["before, item", "before, tolist", "before, tensor", "within, item"])
def test_a_count_of_all_ranks_is_not_what_one_rank_counted(how: str) -> None:
    verdict = prove(counted(how), counted(how), "dp=2")
    assert verdict.verdict == "UNPROVED", str(verdict)
    assert "c10d.allreduce_" in verdict.why and "test_made_up.py" in verdict.why and "real ranks" in verdict.why, verdict.why


def test_a_count_that_stays_a_tensor_in_the_step_is_added_up() -> None:
    verdict = prove(counted("within, tensor"), counted("within, tensor"), "dp=2")
    assert verdict.verdict == "PROVED", str(verdict)


def begun(how: str) -> Callable[[], None]:
    """Parameters that ranks agree on before the step."""

    def train() -> None:
        rank, world = who()
        torch.manual_seed(rank if how in ("broadcast", "average", "from the last") else 0)
        model = nn.Linear(WIDTH, 3)
        for parameter in model.parameters():
            if world > 1 and how in ("broadcast", "from the last", "alike"):
                dist.broadcast(parameter.data, world - 1 if how == "from the last" else 0)
            elif world > 1:
                dist.all_reduce(parameter.data, op=dist.ReduceOp.MAX if how == "largest" else dist.ReduceOp.SUM)
                if how == "average":
                    parameter.data /= world
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x, target = (part.chunk(world)[rank] for part in data())
        nn.functional.cross_entropy(model(x), target).backward()
        for parameter in model.parameters():
            if world > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        update.step()

    return train


@pytest.mark.parametrize("how", ["broadcast", "alike", "largest"])
def test_what_all_ranks_have_or_a_lower_one_broadcasts_is_not_made_up(how: str) -> None:
    verdict = prove(begun(how), begun(how), "dp=3")
    assert verdict.verdict == "PROVED", str(verdict)


@pytest.mark.parametrize("how", ["average", "from the last"])
def test_parameters_that_ranks_would_have_sent_are_made_up(how: str) -> None:
    verdict = prove(begun(how), begun(how), "dp=3")
    assert verdict.verdict == "UNPROVED", str(verdict)
    assert ("allreduce_" if how == "average" else "broadcast_") in verdict.why and "test_made_up.py" in verdict.why


def test_what_is_only_printed_is_no_reason() -> None:
    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 3)
        seen = torch.tensor([float(rank)])
        if world > 1:
            dist.all_reduce(seen)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x, target = data()
        assert len(x) == ROWS
        nn.functional.cross_entropy(model(x), target).backward()
        update.step()

    assert prove(train, train, "dp=2").verdict == "PROVED"


def test_a_model_that_is_wrapped_after_its_optimizer_was_made_is_judged() -> None:
    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        found = nn.parallel.DistributedDataParallel(model) if world > 1 else model
        found(torch.randn(4, 3).chunk(world)[rank]).square().mean().backward()
        update.step()

    assert prove(train, train, "dp=2", proof_s=0).verdict == "EQUAL"
    reduced = next(node for node in tape_of(train, 0, 2).nodes if collective(node.op))
    assert "train" in reduced.place  # the line that calls backward: a bucket has no forward


@pytest.mark.parametrize(("used", "verdict"), [(False, "DIFFERENT"), (True, "UNPROVED")])
def test_what_is_counted_for_a_log_hides_no_mistake(used: bool, verdict: str) -> None:
    """The classes that all ranks' rows get are made up on a fake group: it matters where the loss is made of them."""

    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 3)
        x, target = data()
        rows = x.chunk(world)[rank]
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        found = model(rows)
        whole = [torch.empty_like(found) for _ in range(world)]
        if world > 1:
            dist.all_gather(whole, found.detach())
        likely = (torch.cat(whole) if world > 1 else found.detach()).argmax(-1)
        right = (likely == target).sum()
        del right  # it would be printed
        nn.functional.cross_entropy(found, (likely if used else target).chunk(world)[rank]).backward()  # its gradient is not reduced
        update.step()

    assert prove(train, train, "dp=2").verdict == verdict
