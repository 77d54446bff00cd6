"""Value regression on streams whose scale drifts; inputs are normalised by running statistics."""
import argparse
import json

import torch
from torch import nn


class Normalise(nn.Module):
    """Running mean and variance of what was seen in training (Welford, batched)."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("seen", torch.tensor(1e-3))

    def update(self, x):
        n = len(x)
        shift = x.mean(0) - self.mean
        total = self.seen + n
        mean = self.mean + shift * n / total
        spread = self.var * self.seen + x.var(0, unbiased=False) * n + shift**2 * self.seen * n / total
        self.mean.copy_(mean)
        self.var.clone().copy_(spread / total)
        self.seen.copy_(total)

    def forward(self, x):
        if self.training:
            self.update(x)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    critic = nn.Sequential(Normalise(5), nn.Linear(5, args.width), nn.Tanh(), nn.Linear(args.width, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
    losses = []
    for i in range(args.iters):
        state = torch.randn(24, 5) * (1 + 0.1 * i) + 0.2 * i
        target = state.tanh().sum(1, keepdim=True)
        loss = nn.functional.smooth_l1_loss(critic(state), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


main()
