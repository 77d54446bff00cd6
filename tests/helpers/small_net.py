"""A small net, a training step of it, and recordings of both, made within the test's own process."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.warm import python
from proctor.oracle import Plan, trace, trace_reference

PROGRAM = """
import sys
import torch
from torch import nn

seed, scale, rate = (int(x) for x in sys.argv[1:4])
torch.set_num_threads(1)
if seed >= 0:
    torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=rate / 10)
for _ in range(2):
    loss = net(torch.linspace(0, 1, 64).view(8, 8)).square().mean() * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"RESULT {loss.item().hex()} {sum(p.double().sum() for p in net.parameters()).item().hex()}")
"""


class Net(nn.Module):
    """Two layers; `wide` changes its shape, `twist` makes its forward wrong."""

    def __init__(self, wide: int = 16, twist: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, wide), nn.Linear(wide, 4)
        self.twist = twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x)) * self.twist)  # type: ignore[no-any-return]


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 64).view(8, 8)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> float:
    optimizer.zero_grad()
    loss = net(batch()).square().mean() * scale
    loss.backward()
    optimizer.step()
    return loss.item()


def reference(out: Path, net: nn.Module | None = None, samples: int = 2, steps: int = 1) -> Path:
    """A recording of a reference."""
    model = net if net is not None else Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(steps):
            step(model, optimizer)

    trace_reference(train, model, optimizer, out=out, samples=samples, steps=steps)
    return out


def candidate(out: Path, net: nn.Module | None = None, *, scale: float = 1.0, plan: Plan | None = None, **more: Any) -> Path:
    """A recording of a candidate of one rank."""
    model = net if net is not None else Net()
    with trace(model, out, plan=plan, **more):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), scale)
    return out


def program(folder: Path, text: str = PROGRAM, *arguments: object) -> list[str]:
    """A command that trains the net; arguments are seed (-1 for none), scale of the loss and learning rate × 10."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return [python(), str(path), *map(str, arguments or (0, 1, 1))]
