"""A small model under two sets of names: parts of its own, or fused, transposed and renamed, as another framework has them.

    python renamed.py theirs | fused [MISTAKE]
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDE = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s, bias=False) for s in ((WIDE, 16), (WIDE, 16), (16, WIDE)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDE), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDE, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Conv1D(nn.Module):
    """As GPT-2 has them: a weight that is transposed."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().T.contiguous().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class FusedMlp(nn.Module):
    def __init__(self, theirs: Mlp, wrong: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = Conv1D(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight])), Conv1D(theirs.down_proj.weight)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        gate = gate.detach() if self.wrong == "detached" else gate
        return self.fc2((F.gelu(gate) if self.wrong == "activation" else F.silu(gate)) * up)  # type: ignore[no-any-return]


class FusedBlock(nn.Module):
    def __init__(self, theirs: Block, wrong: str) -> None:
        super().__init__()
        self.ln, self.ffn = nn.LayerNorm(WIDE, eps=1e-2 if wrong == "epsilon" else 1e-5), FusedMlp(theirs.mlp, wrong)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(self.ln(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        theirs = Theirs()
        self.h = nn.ModuleList(FusedBlock(b, wrong if i else "") for i, b in enumerate(theirs.layers))  # type: ignore[arg-type]
        self.out = nn.Linear(WIDE, 4, bias=False)
        self.out.weight = nn.Parameter(theirs.head.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]


def train(model: nn.Module, wrong: str) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.randn(16, WIDE, generator=generator)) - torch.randn(16, 4, generator=generator)).square().mean().backward()
        if wrong == "doubled":
            model.h[1].ffn.fc1.weight.grad *= 2  # type: ignore[index, union-attr]
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mistake = sys.argv[2] if len(sys.argv) > 2 else ""
    train(Theirs() if sys.argv[1] == "theirs" else Fused(mistake), mistake)
