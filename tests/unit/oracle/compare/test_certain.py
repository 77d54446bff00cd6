"""oracle/judging/certain.py and assemble.py: when a tensor of the whole's shape must be the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to  # noqa: E402
from helpers.small_net import Net, batch, candidate, reference  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.judging.verdicts import failing  # noqa: E402


def test_a_large_error_of_one_process_is_wrong_and_not_unmapped(tmp_path: Path) -> None:
    net = Net()
    net.first.register_forward_hook(lambda m, i, o: -3 * o)
    found = compare_to(reference(tmp_path / "r"), candidate(tmp_path / "c", net))
    assert found.first is not None and (found.first.kind, found.first.name) == ("output", "first")
    assert not any(t.verdict == "unmapped" for t in found.tensors)


class Lossy(Net):
    """Returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def test_losses_of_microbatches_are_no_replicas_of_the_whole_batchs(tmp_path: Path) -> None:
    from proctor.oracle import trace_reference

    def train(net: Lossy, parts: int) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for rows in batch().chunk(parts):
            (net(rows) / parts).backward()
        optimizer.step()

    alone, other = Lossy(), Lossy()
    trace_reference(lambda: train(alone, 1), alone, out=tmp_path / "r", samples=2)
    with trace(other, tmp_path / "c"):
        train(other, 4)
    found = compare_to(tmp_path / "r", tmp_path / "c")
    assert found.verdict == "equivalent", (found.reason, found.first, found.replicas)
    assert not any(failing(t) for t in found.tensors)
