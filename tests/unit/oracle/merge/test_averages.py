"""oracle/merging/averages.py: a model that returns its loss, of which each data-parallel rank has that of its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.verdicts import TensorVerdict  # noqa: E402
from proctor.oracle.store import ProcessInfo, Recording  # noqa: E402


class Net(nn.Module):
    """Gives the loss times `times`; `known` is a mean that was taken in the model over all ranks."""

    def __init__(self, times: float = 1.0, known: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.times, self.known = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), times, known

    def forward(self, rows: Any) -> Any:
        loss = self.net(rows).square().mean() * self.times
        return loss if self.known is None else self.known + (loss - loss.detach()) / 2


ROWS = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


def losses(folder: Path, parts: list[Any], *nets: Net) -> dict[str, TensorVerdict]:
    """What is said of the loss and its gradient, of ranks that each take a part."""
    reference = Net()
    trace_reference(lambda: reference(ROWS).backward(), reference, out=folder / "reference", samples=1)
    for rank, (part, net) in enumerate(zip(parts, nets, strict=True)):
        with trace(net, folder / f"rank{rank}"):
            net(part).backward()
        home = (folder / f"rank{rank}" / "runs" / "clean" / "rank0").rename(folder / "rank0" / "runs" / "clean" / f"rank{rank}")
        info = msgspec.json.decode((home / "process.json").read_bytes(), type=ProcessInfo)
        info.rank, info.world = rank, len(parts)
        (home / "process.json").write_bytes(msgspec.json.encode(info))
    verdict = Comparison(Recording(folder / "reference"), Recording(folder / "rank0")).run()
    assert not [r for r in verdict.replicas if r.name == ""], verdict.replicas
    return {t.kind: t for t in verdict.tensors if t.name == "" and t.kind in ("output", "grad_output")} | {
        t.name: t for t in verdict.tensors if t.kind == "grad_output" and t.name
    }


@pytest.mark.parametrize("at", [6, 4])
def test_the_mean_over_ranks_is_compared(tmp_path: Path, at: int) -> None:
    found = losses(tmp_path, [ROWS[:at], ROWS[at:]], Net(), Net())
    assert (found["output"].verdict, found["output"].layout) == ("ok", "mean over ranks")
    if at == 6:  # else each rank scales its gradients in another way
        assert {t.verdict for t in found.values()} == {"ok"}


def test_another_mean_is_listed_and_does_not_decide(tmp_path: Path) -> None:
    assert losses(tmp_path, [ROWS[:6], ROWS[6:]], Net(1.1), Net(0.9))["output"].verdict == "unmapped"


def test_a_mean_that_the_model_took_is_left_alone(tmp_path: Path) -> None:
    whole = float(Net()(ROWS).detach())
    found = losses(tmp_path, [ROWS[:6], ROWS[6:]], Net(known=whole), Net(known=whole))
    assert {t.verdict for t in found.values()} == {"ok"} and found["output"].layout == "whole"
