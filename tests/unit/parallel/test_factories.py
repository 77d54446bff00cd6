"""Tensors that a forward makes out of nothing: each rank gets its part, as the plan says."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import parallelize, run_threads, verify
from proctor.oracle.plans.plan import Plan as Read
from proctor.oracle.plans.plan_toml import format_plan, plan_of

WIDTH, HEADS, TIME = 16, 4, 6


class Slopes(nn.Module):
    def forward(self) -> torch.Tensor:
        return 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float32)


class Attention(nn.Module):
    """Attention with ALiBi: slopes of all heads are made in the forward, and so are positions and the mask, which all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.slopes = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), Slopes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, time, _ = x.shape
        q, k, v = self.qkv(x).view(rows, time, -1, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        far = torch.arange(time)[None, :] - torch.arange(time)[:, None]
        scores = (q @ k.mT + self.slopes()[:, None, None] * far).masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -1e9)
        scale = torch.full((HEADS, 1, 1), 0.5) * torch.linspace(1, 2, steps=HEADS)[:, None, None]
        return self.out((scores.softmax(-1) @ v * scale).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


def heads() -> Plan:
    plan = Plan("tp=2").style("colwise", r"attention\.qkv", "tp").style("rowwise", r"attention\.out", "tp", bias=False)
    return plan.factory("attention", "full", ndim=3, tp=0).factory("attention", "linspace", tp=0).factory(r"attention\.slopes", tp=0)


ONE_AT_A_TIME = threading.Lock()  # the ranks are threads, and draw from one generator


def outcome(make, plan: Plan | None, x: torch.Tensor):
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        model = make()
    if plan is not None:
        parallelize(model, plan, seed=0)
    out = model(x)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_slopes_of_heads_are_those_of_this_rank_and_other_tensors_stay():
    x = torch.randn(3, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted, gradients = outcome(Net, None, x)
    for out, parts in run_threads(lambda rank: outcome(Net, heads(), x), 2):
        assert torch.allclose(out, wanted, atol=1e-6)
        whole = gradients["attention.qkv.weight"]
        assert any(torch.allclose(parts["attention.qkv.weight"], half, atol=1e-6) for half in whole.chunk(2))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.arange(0, 2 * x.shape[1], 2, device=x.device)
        return x + self.table(here) + torch.linspace(0.0, 1.0, x.shape[1])[:, None] + torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.1


def test_positions_go_on_where_the_rank_before_stopped():
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    plan = Plan("sp=4").redistribute("", at="input", dst={"sp": 1}).redistribute("", at="output", src={"sp": 1})
    plan.pending(".*", "sp").factory("", sp=0, sizes="part")
    wanted, gradients = outcome(Positions, None, x)
    for out, parts in run_threads(lambda rank: outcome(Positions, plan, x), 4):
        assert torch.allclose(out, wanted, atol=1e-6)
        assert torch.allclose(parts["table.weight"], gradients["table.weight"], atol=1e-6)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, 4) + torch.randn(8, 4).mul(0.1) + x.new_zeros((8, 4)) + torch.eye(8, 4)


def test_random_factories_get_the_sizes_here_and_the_numbers_from_the_draws():
    def run(mesh: str) -> torch.Tensor:
        plan = Plan(mesh).redistribute("", at="input", dst={"dp": 0}).redistribute("", at="output", src={"dp": 0}).factory("", dp=0).draw("", dp=0)
        return parallelize(Noisy(), plan, seed=3)(torch.ones(8, 4))

    wanted = run("dp=1")
    for found in run_threads(lambda rank: run("dp=4"), 4):
        assert torch.equal(found, wanted)


def test_what_cannot_be_divided_is_one_line_with_the_users_line():
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(5)

    with pytest.raises(OracleError, match=r"makes a tensor by zeros \(.*test_factories\.py:\d+ in forward\): dimension 0 of \[5\] is not divisible by 2"):
        run_threads(lambda rank: parallelize(Odd(), Plan("tp=2").factory("", tp=0))(torch.ones(5)), 2)


def test_a_factory_that_matches_nothing_or_names_no_axis_is_refused():
    found = verify.problems(Plan("tp=2").factory("attn", tp=0), Net())
    assert any("factory 'attn' matches nothing" in line for line in found), found
    found = verify.problems(Plan("tp=2").factory("attention", cp=0), Net())
    assert any("has no axis 'cp'" in line for line in found), found
    with pytest.raises(OracleError, match="sizes is 'some'"):
        Plan("tp=2").factory("attention", sizes="some", tp=0)


def test_a_factory_is_the_same_after_its_file(tmp_path):
    plan = heads().factory("", "arange", sizes="part", tp=0)
    (tmp_path / "plan.toml").write_text(format_plan(plan))
    again = plan_of(tmp_path / "plan.toml")
    assert again is not None and again.factories == plan.factories
    assert Read.from_json(plan.to_json()).factories == plan.factories == plan.on(plan.mesh).factories
