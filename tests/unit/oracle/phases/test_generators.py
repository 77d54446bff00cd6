"""Ranks that draw the same numbers for different features are found where no module is a dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to, record_ranks  # noqa: E402
from helpers.small_net import step  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from proctor.oracle import trace_reference  # noqa: E402
from proctor.oracle.judging.verdicts import failing  # noqa: E402


class Attention(nn.Module):
    """Fused attention with dropout, over four heads or two of them; a sum over ranks is left to the test."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(8, 24, bias=False)
        self.qkv = whole
        self.heads = 4 if rank is None else 2
        if rank is not None:
            self.qkv = nn.Linear(8, 12, bias=False)
            self.qkv.weight = nn.Parameter(torch.cat([w.chunk(2)[rank] for w in whole.weight.detach().chunk(3)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(2, 4, 8)
        q, k, v = (t.view(2, 4, self.heads, 2).transpose(1, 2) for t in self.qkv(rows).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


@pytest.mark.parametrize("alike", [True, False])
def test_fused_attention_with_one_seed_over_heads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    def train(model: Any, seed: int) -> None:
        torch.manual_seed(seed)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    whole = Attention(None)
    trace_reference(lambda: train(whole, 1), whole, out=tmp_path / "r", samples=2)

    def run(rank: int) -> Any:
        model = Attention(rank)
        return model, lambda: train(model, 1 if alike else 1 + rank)

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    wrong = [t for t in found.tensors if t.kind == "dropout" and failing(t)]
    assert [(t.name, t.ranks) for t in wrong] == ([("", (0, 1))] if alike else [])
