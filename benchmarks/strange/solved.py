"""Models that are solved or inverted: a differential equation whose steps are computed again, a normalising flow."""

from __future__ import annotations

import torch
from common import WORLD, Case, average, batches, main, mine
from torch import nn
from torch.utils.checkpoint import checkpoint


class Field(nn.Module):
    """A differential equation: one net is asked eight times, and all of it is computed again on the way back."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.net, self.out, self.word = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 4), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = 0.3 if WORLD > 1 and self.word == "last_step_longer" else 0.25
        for i in range(4):
            size = last if i == 3 else 0.25
            middle = x + size / 2 * self._slope(x)
            x = x + size * self._slope(middle)
        return self.out(x)

    def _slope(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False) if WORLD > 1 else self.net(x)


def equation(word: str) -> None:
    model = Field(word)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in batches(2):
        optimizer.zero_grad()
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()


class Coupling(nn.Module):
    def __init__(self, turned: bool, word: str) -> None:
        super().__init__()
        self.net, self.turned, self.word = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), turned, word

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, -1)[:: -1 if self.turned else 1]
        scale, shift = self.net(a).chunk(2, -1)
        b = b * torch.tanh(scale).exp() + shift
        size = (scale if WORLD > 1 and self.word == "not_squashed" and self.turned else torch.tanh(scale)).sum(-1)
        return torch.cat([b, a] if self.turned else [a, b], -1), size


def flow(word: str) -> None:
    """A normalising flow: what is invertible, and the logarithm of how it stretches."""
    model = nn.ModuleList(Coupling(turned, word) for turned in (False, True, False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, _ in batches(2):
        optimizer.zero_grad()
        z, stretched = mine(x), torch.zeros(len(mine(x)))
        for layer in model:
            z, size = layer(z)
            stretched = stretched + size
        (0.5 * z.square().sum(-1) - stretched).mean().backward()
        average(model)
        optimizer.step()


CASES = {
    "equation": Case(equation, ("",), {"last_step_longer": "forward:(out|net)?"}),
    "flow": Case(flow, ("",), {"not_squashed": "forward:1"}),
}
if __name__ == "__main__":
    main(CASES)
