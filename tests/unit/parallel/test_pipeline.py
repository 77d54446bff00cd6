"""Stages of a pipeline on thread ranks: what one device trains."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle.parallel_gpt import batches, gpt, make, plan

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import deferred, parallelize, run_threads, verify
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan_toml import format_plan, plan_of


def train(mesh: Mesh | None, dropout: float = 0.0, steps: int = 2):
    """Losses, norms and the state afterwards; mesh: None for torch alone."""
    if mesh is None:
        torch.manual_seed(0)
        model = make(dropout)
    else:
        model = parallelize(deferred(make, dropout), plan("gpt_pp.toml").on(mesh), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    said = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = gpt().next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        said.append((loss.item(), norm.item()))
    own = sum(p.numel() for p in model.parameters())
    return said, model.state_dict(), own, model


AXES = ("pp", "dp", "tp")


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 1, 2), (2, 2, 2)])
def test_stages_train_what_one_rank_trains_with_dropout(sizes):
    wanted, state, whole, _ = train(Mesh(AXES, (1, 1, 1)), dropout=0.2)
    ranks = run_threads(lambda rank: train(Mesh(AXES, sizes), dropout=0.2)[:3], sizes[0] * sizes[1] * sizes[2])
    for said, found, own in ranks:
        assert said == [(pytest.approx(loss, abs=2e-6), pytest.approx(norm, abs=2e-5)) for loss, norm in wanted]
        assert list(found) == list(state)
        assert all(torch.allclose(found[name], state[name], atol=2e-6) for name in state)
        assert own < 0.7 * whole


def test_microbatches_of_one_rank_are_torch_alone_without_dropout():
    model = make()
    start = model.state_dict()
    torch.manual_seed(0)

    def rank(number):
        one = make()
        one.load_state_dict(start)
        parallelize(one, plan("gpt_pp.toml").on(Mesh(AXES, (2, 1, 1))))
        batch = batches(1)[0]
        loss = gpt().next_token_loss(one(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        one.load_state_dict(start)
        return loss.item(), {name: p.grad for name, p in one.named_parameters()}

    batch = batches(1)[0]
    loss = gpt().next_token_loss(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    (first, one), (second, other) = run_threads(rank, 2)
    assert first == second == pytest.approx(loss.item(), abs=1e-6)
    gradients = {**one, **other}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name


class Skip(torch.nn.Module):
    """Its last unit takes from the first one, over the head of the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        first = self.a(x)
        return self.c(self.b(first) + first)


def three() -> Plan:
    return Plan("pp=3").pipeline("a", "b", "c", axis="pp")


def test_what_skips_a_stage_is_refused_in_the_first_forward():
    def rank(number):
        torch.manual_seed(0)
        return parallelize(Skip(), three())(torch.ones(2, 4))

    with pytest.raises(OracleError, match="earlier stage than the one before"):
        run_threads(rank, 3)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (("a", "b"), "2 stages, and pp has 3 ranks"),
        (("a", "b", "b|c"), "b is of stage 1 and of stage 2"),
        (("a", "b", "d"), "'d' matches nothing"),
        (("a", "", "c"), "the model itself"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(stages, said):
    found = verify.problems(Plan("pp=3").pipeline(*stages, axis="pp"), Skip())
    assert any(said in line for line in found), found


def test_a_plan_with_stages_is_the_same_after_its_file(tmp_path):
    one = plan("gpt_pp.toml")
    (tmp_path / "again.toml").write_text(format_plan(one))
    assert plan_of(tmp_path / "again.toml").pipelines == one.pipelines
    assert type(one).from_json(one.to_json()).pipelines == one.pipelines


def test_the_stock_stream_cannot_drop_in_stages():
    def rank(number):
        parallelize(make(0.1), plan("gpt_pp.toml").on(Mesh(AXES, (2, 1, 1))), rng="stock")

    with pytest.raises(OracleError, match="a stage makes its own only"):
        run_threads(rank, 2)
