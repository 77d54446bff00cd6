"""oracle/collect/finding/generate.py: the same parameters on both sides, however they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.finding.generate import generate_parameters  # noqa: E402
from proctor.oracle.plans.plan import Plan  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402


def whole(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_values_depend_on_names_and_seed_alone() -> None:
    one, two, other = (whole(a=(4, 6), b=(4, 6)) for _ in range(3))
    assert generate_parameters(one.items(), 3, "", 0, 1) == []
    generate_parameters(reversed(two.items()), 3, "", 5, 8)  # type: ignore[call-overload]
    generate_parameters(other.items(), 4, "", 0, 1)
    assert torch.equal(one["a"], two["a"]) and torch.equal(one["b"], two["b"])
    assert not torch.equal(one["a"], one["b"]) and not torch.equal(one["a"], other["a"])


def test_shards_make_up_the_whole() -> None:
    plan = Plan("dp=2,tp=2").shard("qkv", tp="interleaved:0:3").shard("fc", tp=1)
    full = whole(qkv=(12, 4), fc=(4, 8), norm=(6,))
    generate_parameters(full.items(), 0, "", 0, 1)
    ranks = []
    for rank in range(4):
        mine = whole(qkv=(6, 4), fc=(4, 4), norm=(6,))
        assert generate_parameters(mine.items(), 0, plan.to_json().decode(), rank, 4) == []
        ranks.append(mine)
    assert torch.equal(torch.cat([ranks[0]["fc"], ranks[1]["fc"]], 1), full["fc"])
    parts = [r["qkv"].view(3, 2, 4) for r in ranks[2:]]
    assert torch.equal(torch.cat(parts, 1).reshape(12, 4), full["qkv"])
    assert all(torch.equal(r["norm"], full["norm"]) for r in ranks)


def test_a_plan_of_the_candidate_does_not_cut_the_reference() -> None:
    plan = Plan("tp=2").shard("w", tp=0).to_json().decode()
    full, plain = whole(w=(8, 2)), whole(w=(8, 2))
    generate_parameters(full.items(), 0, plan, 0, 1)
    generate_parameters(plain.items(), 0, "", 0, 1)
    assert torch.equal(full["w"], plain["w"])


def test_nothing_is_trivial_and_types_are_kept() -> None:
    made = {
        "bias": nn.Parameter(torch.zeros(64)),
        "norm": nn.Parameter(torch.ones(64, dtype=torch.bfloat16)),
        "weight": nn.Parameter(torch.randn(64, 64, dtype=torch.float64)),
        "ids": nn.Parameter(torch.arange(4), requires_grad=False),
    }
    generate_parameters(made.items(), 0, "", 0, 1)
    assert 0.005 < made["bias"].std() < 0.05 and made["bias"].mean().abs() < 0.02
    assert made["norm"].dtype is torch.bfloat16 and 0.9 < made["norm"].float().mean() < 1.1 and made["norm"].float().std() > 0
    assert 0.04 < made["weight"].std() < 0.09  # half of 1/√64
    assert made["ids"].tolist() == [0, 1, 2, 3]


def test_a_shard_that_does_not_fit_is_said() -> None:
    plan = Plan("tp=2").shard("w", tp="interleaved:0:[5,2]").to_json().decode()
    made = whole(w=(4, 2))
    before = made["w"].detach().clone()
    notes = generate_parameters(made.items(), 0, plan, 0, 2)
    assert len(notes) == 1 and "w: not generated" in notes[0] and torch.equal(made["w"], before)


def test_an_optimizers_copy_follows_also_where_parameters_were_of_one_value(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in net.parameters()]))
    optimizer = torch.optim.SGD([flat], lr=0.1)
    with trace(net, tmp_path / "r", generate=3):
        net(torch.randn(5, 4)).square().mean().backward()
        assert net[1].weight.std() > 0
        assert torch.equal(flat, torch.cat([p.flatten() for p in net.parameters()]))
        flat.grad = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        optimizer.step()
    taken = {e.name for e in Recording(tmp_path / "r").ranks()[0].entries if e.kind == "main_grad"}
    assert taken == {n for n, _ in net.named_parameters()}
