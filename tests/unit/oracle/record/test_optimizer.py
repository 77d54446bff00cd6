"""oracle/localising/optimizer.py: an optimizer that is given the reference's gradients is judged by rounding alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.judging.blame import culprit  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict, failing  # noqa: E402
from proctor.oracle.localising.localise import _write  # noqa: E402
from proctor.oracle.localising.optimizer import isolate_updates  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402

Make = Callable[[nn.Module], Any]


class Flat:
    """One flat master copy of all parameters, which the optimizer updates; like ZeRO on one rank."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        self.held = list(net.parameters())
        self.master = nn.Parameter(torch.cat([p.detach().float().flatten() for p in self.held]))
        self.inner = torch.optim.AdamW([self.master], **options)

    def zero_grad(self) -> None:
        for p in self.held:
            p.grad = None

    def step(self) -> None:
        self.master.grad = torch.cat([p.grad.float().flatten() for p in self.held if p.grad is not None])
        self.inner.step()
        at = 0
        for p in self.held:
            p.data.copy_(self.master.detach()[at : at + p.numel()].view_as(p))
            at += p.numel()


def train(net: nn.Module, optimizer: Any, twist: float = 1.0) -> None:
    optimizer.zero_grad()
    dtype = next(net.parameters()).dtype
    (net(batch().to(dtype)).float() * twist).square().mean().backward()
    optimizer.step()


def adamw(**options: Any) -> Make:
    return lambda net: torch.optim.AdamW(net.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, **options})


def flat(**options: Any) -> Make:
    return lambda net: Flat(net, **{"lr": 1e-3, "weight_decay": 0.1, **options})


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        net = Net().to(dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1) if dtype == torch.float32 else Flat(net, lr=1e-3, weight_decay=0.1)
        stateful = [optimizer] if dtype == torch.float32 else [optimizer.inner]  # type: ignore[union-attr]
        out[dtype] = tmp_path_factory.mktemp("optimizer") / "reference"
        begin = [p.detach().clone() for p in net.parameters()]

        def body(net: nn.Module = net, optimizer: Any = optimizer, begin: list[torch.Tensor] = begin) -> None:
            if isinstance(optimizer, Flat):
                optimizer.master.data.copy_(torch.cat([p.float().flatten() for p in begin]))
            train(net, optimizer)

        trace_reference(body, net, *stateful, out=out[dtype], samples=2)
    return out


def alone(reference: Path, out: Path, make: Make, dtype: Any = torch.float32, twist: float = 1.0) -> Verdict:
    """As `localise` does it, without processes of its own."""
    net = Net().to(dtype)
    with trace(net, out):
        train(net, make(net), twist)
    recordings = Recording(reference), Recording(out)
    comparison = Comparison(*recordings)
    comparison.run()
    force = out / "force"
    force.mkdir()
    assert _write(comparison, force)
    net = Net().to(dtype)
    optimizer = make(net)
    (out / "runs" / "forced").mkdir()
    collector = Collector(CollectConfig(folder=str(out / "runs" / "forced"), force=str(force)))
    if isinstance(optimizer, Flat):
        collector.optimizers.add(optimizer.inner)
    collector.install()
    try:
        collector.adopt([net])
        train(net, optimizer, twist)
    finally:
        collector.end()
    forced = Comparison(*recordings, run="forced")
    return isolate_updates(forced, forced.run())


def wrong(found: Verdict) -> set[tuple[str, str]]:
    return {(t.kind, t.slot) for t in found.tensors if failing(t) and t.kind != "scalar"}


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": False, "maximize": False}])
def test_any_implementation_of_the_same_update_is_right(references: dict[Any, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    found = alone(references[torch.float32], tmp_path / "c", adamw(**options))
    assert not wrong(found) and found.verdict == "equivalent"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 1.01e-3}, "1.01 times the reference's"),
        ({"lr": 0.0}, "not updated"),
        ({"weight_decay": 0.0}, "off by"),
        ({"eps": 1e-3}, "off by"),
        ({"betas": (0.8, 0.999)}, "exp_avg"),
    ],
)
def test_a_wrong_update_is_named(references: dict[Any, Path], tmp_path: Path, options: dict[str, Any], said: str) -> None:
    found = alone(references[torch.float32], tmp_path / "c", adamw(**options))
    culprit_ = culprit(found, found)
    assert culprit_ is not None and culprit_.direction == "update" and said in culprit_.text


def test_wrong_gradients_do_not_make_the_update_wrong(references: dict[Any, Path], tmp_path: Path) -> None:
    found = alone(references[torch.float32], tmp_path / "c", adamw(), twist=2.0)
    assert ("main_grad", "") in wrong(found)
    assert not {kind for kind, _ in wrong(found)} & {"opt_state", "param_after"}


def test_a_flat_master_copy_gives_power_in_bfloat16(references: dict[Any, Path], tmp_path: Path) -> None:
    found = alone(references[torch.bfloat16], tmp_path / "c", flat(), torch.bfloat16)
    assert not wrong(found)
    assert any(t.slot == "master" for t in found.tensors)
    found = alone(references[torch.bfloat16], tmp_path / "d", flat(lr=1.01e-3), torch.bfloat16)
    assert wrong(found) == {("opt_state", "master")}
