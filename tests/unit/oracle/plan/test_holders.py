"""oracle/judging/holders.py, buffers.py, certain.py: every holder of a replica must have it, and equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to, record_ranks  # noqa: E402
from helpers.small_net import Net, batch  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace_reference  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict  # noqa: E402


class Mixed:
    """bfloat16 weights and float32 masters, made before (`better`) or after the weights were rounded."""

    def __init__(self, *, better: bool = False) -> None:
        exact = Net()
        self.model = Net().bfloat16()
        self.masters = [(p if better else p.bfloat16().float()).detach().clone() for p in exact.parameters()]
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), exact.parameters(), strict=True):
                p.copy_(q)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5)

    def train(self, *, steps: bool = True, copies: Callable[[int], bool] = lambda i: True, scale: float = 1.0) -> None:
        self.model(batch().bfloat16()).float().square().mean().backward()
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() * scale, None
        if not steps:
            return
        self.optimizer.step()
        with torch.no_grad():
            for i, (p, master) in enumerate(zip(self.model.parameters(), self.masters, strict=True)):
                if copies(i):
                    p.copy_(master)


def mixed(path: Path, patch: pytest.MonkeyPatch, other: dict[str, Any], *, better: bool = False, both: bool = False) -> Verdict:
    """Rank 1 trains otherwise; or both ranks."""
    _reference(path / "r", better)

    def run(rank: int) -> tuple[Any, Callable[[], None]]:
        one = Mixed(better=better)
        return one.model, lambda: one.train(**(other if rank or both else {}))

    return compare_to(path / "r", record_ranks(path / "c", patch, run))


def _reference(out: Path, better: bool) -> None:
    from proctor.oracle import trace
    from proctor.oracle.store import Recording, write_json

    for name in ("clean", "again", "noise-0", "noise-1"):
        one = Mixed(better=better)
        with trace(one.model, out, run=name, eager=True):
            one.train()
    info = Recording(out).info
    info.samples = 2
    write_json(out / "oracle.json", info)


@pytest.mark.parametrize("better", [False, True])
def test_masters_are_fine_where_all_ranks_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: bool) -> None:
    found = mixed(tmp_path, monkeypatch, {}, better=better)
    assert found.verdict == "equivalent", (found.reason, found.first, found.replicas)
    assert any(t.kind == "opt_state" and t.slot == "master" for t in found.tensors)


def test_a_rank_that_never_steps_is_found_although_rounding_hides_its_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mixed(tmp_path, monkeypatch, {"steps": False})
    assert found.verdict == "different"
    assert found.replicas and all(1 in r.ranks and 0 not in r.ranks for r in found.replicas)


@pytest.mark.parametrize("better", [False, True])
def test_a_weight_is_its_master_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: bool) -> None:
    found = mixed(tmp_path, monkeypatch, {"copies": lambda i: i != 0}, better=better, both=True)
    assert found.verdict == "different", found.reason
    assert {t.name for t in found.tensors if t.kind == "master"} == {"first.weight"}


def test_replicas_that_begin_apart_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.small_net import reference, step

    def run(rank: int) -> tuple[Any, Callable[[], object]]:
        net = Net()
        if rank:
            with torch.no_grad():
                net.last.weight.mul_(1.5)
        return net, lambda: step(net, torch.optim.SGD(net.parameters(), lr=0.1))

    found = compare_to(reference(tmp_path / "r"), record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == "different"
    assert next((r.name, r.kind) for r in found.replicas) == ("last.weight", "param")


def test_one_ranks_wrong_output_is_found_although_no_plan_says_that_both_hold_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.small_net import reference, step

    def run(rank: int) -> tuple[Any, Callable[[], object]]:
        net = Net()
        net.first.register_forward_hook(lambda m, i, o: o * 3 if rank else o)
        return net, lambda: step(net, torch.optim.SGD(net.parameters(), lr=1e-9))

    found = compare_to(reference(tmp_path / "r"), record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == "different" and any(r.kind == "output" and r.ranks == (1,) for r in found.replicas), found.replicas


class Running(nn.Module):
    """Keeps a mean of what it sees."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.layer, self.norm, self.momentum = nn.Linear(8, 4), nn.Identity(), momentum
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("offset", torch.zeros(4))
        self.mean: Any
        self.seen: Any

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(out.mean(0), self.momentum)
            self.seen += 1
        return out - self.mean.detach() * 0


@pytest.mark.parametrize(("momentum", "verdict"), [((0.1, 0.1), "equivalent"), ((0.1, 0.3), "different"), ((0.0, 0.0), "different")])
def test_buffers_that_a_step_changes_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, momentum: tuple[float, float], verdict: str
) -> None:
    from helpers.small_net import step

    torch.manual_seed(0)
    alone = Running()
    state = {k: v.clone() for k, v in alone.state_dict().items()}
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    trace_reference(lambda: step(alone, optimizer), alone, optimizer, out=tmp_path / "r", samples=2)  # type: ignore[arg-type]

    def run(rank: int) -> tuple[Any, Callable[[], object]]:
        one = Running(momentum[rank])
        one.load_state_dict(state)
        with torch.no_grad():
            one.offset += rank  # a constant of the rank's own
        return one, lambda: step(one, torch.optim.SGD(one.parameters(), lr=0.1))  # type: ignore[arg-type]

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    assert found.verdict == verdict, (found.reason, found.first, found.replicas)
    assert {t.name for t in found.tensors if t.kind == "buffer_after"} == {"mean", "seen"}
    assert any("buffer offset" in text for text in found.unchecked)
    if verdict == "different":
        assert {t.name for t in found.tensors if t.verdict == "bad"} == {"mean"}
        assert found.replicas or momentum == (0.0, 0.0)
