"""oracle/judging/scalars.py: norms, clipping and settings of optimizers, from recordings of a small net."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.scalars import clip_room, coefficient, total_norm  # noqa: E402
from proctor.oracle.judging.verdicts import TensorVerdict, Verdict  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402

Clip = Callable[[nn.Module], object]
LIMIT = 0.01


def clipped(net: nn.Module, limit: float = LIMIT) -> object:
    return nn.utils.clip_grad_norm_(net.parameters(), limit)


def train(net: Net, optimizer: torch.optim.Optimizer, clip: Clip = clipped) -> None:
    optimizer.zero_grad()
    net(batch()).square().mean().backward()
    clip(net)
    optimizer.step()


def adamw(net: Net, **options: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **{"lr": 1e-3, **options})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scalars") / "reference"
    net = Net()
    optimizer = adamw(net)
    trace_reference(lambda: train(net, optimizer), net, optimizer, out=out, samples=2)
    return out


def judged(reference: Path, out: Path, clip: Clip = clipped, optimizer: Callable[[Net], torch.optim.Optimizer] = adamw) -> Verdict:
    net = Net()
    made = optimizer(net)
    with trace(net, out):
        train(net, made, clip)
    return Comparison(Recording(reference), Recording(out)).run()


def scalars(found: Verdict) -> dict[str, TensorVerdict]:
    return {t.name: t for t in found.tensors if t.kind == "scalar"}


def test_a_healthy_run(reference: Path, tmp_path: Path) -> None:
    found = judged(reference, tmp_path / "c")
    assert found.verdict == "equivalent"
    assert {n: t.verdict for n, t in scalars(found).items()} == {"grad_norm": "ok", "clip_coefficient": "ok", "lr": "ok"}


def test_a_limit_that_does_not_hold(reference: Path, tmp_path: Path) -> None:
    found = judged(reference, tmp_path / "c", lambda net: clipped(net, 1e9))
    wrong = scalars(found)
    assert found.verdict == "different"
    assert wrong["clip_coefficient"].verdict == "bad" and "multiplied by 1 " in wrong["clip_coefficient"].note
    assert wrong["grad_norm"].verdict == "ok"


def test_a_norm_that_is_wrong(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(net: nn.Module) -> None:
        held = list(net.parameters())
        for p in held[1:]:
            p.grad, p.kept = None, p.grad  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_(held, 1e9)
        for p in held[1:]:
            p.grad = p.kept  # type: ignore[attr-defined]

    assert scalars(judged(reference, tmp_path / "c", part)).keys() == {"lr"}  # not all gradients were seen: nothing is said

    module = importlib.import_module("torch.nn.utils.clip_grad")
    if not hasattr(module, "_get_total_norm"):
        pytest.skip("this torch computes the norm elsewhere")
    original = module._get_total_norm
    monkeypatch.setattr(module, "_get_total_norm", lambda *a, **k: 0.5 * original(*a, **k))
    found = scalars(judged(reference, tmp_path / "d"))["grad_norm"]
    assert found.verdict == "bad" and "that of the whole gradient is" in found.note


def test_a_program_that_clips_by_itself_or_only_measures(reference: Path, tmp_path: Path) -> None:
    def own(net: nn.Module) -> None:
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None))
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(coefficient(norm, LIMIT))

    found = judged(reference, tmp_path / "c", own)
    assert found.verdict == "equivalent" and scalars(found).keys() == {"lr"}

    def measured(net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(list(net.parameters())[:2], math.inf)
        own(net)

    found = judged(reference, tmp_path / "d", measured)
    assert found.verdict == "equivalent" and scalars(found).keys() == {"lr"}


def test_rates_are_compared_by_parameter(reference: Path, tmp_path: Path) -> None:
    def grouped(rates: tuple[float, float]) -> Callable[[Net], torch.optim.Optimizer]:
        return lambda net: torch.optim.AdamW(
            [{"params": net.last.parameters(), "lr": rates[0]}, {"params": net.first.parameters(), "lr": rates[1]}]
        )

    assert judged(reference, tmp_path / "c", optimizer=grouped((1e-3, 1e-3))).verdict == "equivalent"
    found = judged(reference, tmp_path / "d", optimizer=grouped((1e-3, 1.01e-3)))
    assert found.verdict == "different"
    assert found.first is not None and found.first.name == "lr"
    assert "lr 0.00101 for first.bias and 1 more on rank 0, the reference has 0.001" in found.first.note


def test_other_settings_only_between_optimizers_of_one_class(reference: Path, tmp_path: Path) -> None:
    found = judged(reference, tmp_path / "c", optimizer=lambda net: adamw(net, weight_decay=0.0))
    assert scalars(found)["weight_decay"].verdict == "bad"

    class Decayed(torch.optim.AdamW):
        """Decays by itself."""

    found = judged(reference, tmp_path / "d", optimizer=lambda net: Decayed(net.parameters(), lr=1e-3, weight_decay=0.0))
    assert "weight_decay" not in scalars(found)


def test_norms_are_summed_in_double() -> None:
    parts = [(np.full(1000, 1e-3, np.float32), "float32"), (np.full(7, 3.0, np.float32), "float32")]
    assert total_norm(parts) == pytest.approx(math.sqrt(1000e-6 + 63.0), rel=1e-7)
    assert coefficient(2.0, 1.0) == pytest.approx(0.5, rel=1e-6)
    assert coefficient(0.5, 1.0) == coefficient(9.0, None) == 1.0


def test_the_rounding_of_the_norm_that_clipping_took_is_no_difference(reference: Path, tmp_path: Path) -> None:
    """Right norms are sums in another order, and scale all gradients alike; more than rounding is no room."""

    def clip_by(factor: float) -> Clip:
        def clip(net: nn.Module) -> object:
            parameters = list(net.parameters())
            with torch.no_grad():
                for p in parameters:
                    assert p.grad is not None
                    p.grad.mul_(factor)  # after it was recorded unclipped: as a norm that is smaller by this would scale it
            return None

        return lambda net: (clipped(net), clip(net))

    rounded = judged(reference, tmp_path / "rounded", clip_by(1 - 4e-6))
    assert rounded.verdict == "different", "the norm that was told is the reference's, so nothing explains it"
    comparison = Comparison(Recording(reference), Recording(tmp_path / "rounded"))
    [clip] = comparison.ranks[0].info.clips
    assert clip.norm is not None
    comparison.ranks[0].info.clips = [msgspec.structs.replace(clip, norm=clip.norm * (1 + 4e-6))]
    assert comparison.run().verdict == "equivalent"
    comparison.ranks[0].info.clips = [msgspec.structs.replace(clip, norm=clip.norm * (1 + 1e-3))]
    assert clip_room(comparison.reference, comparison.assembler, 0) == 0.0
