"""Regression with Monte-Carlo dropout: uncertainty from several forward passes with dropout on.

Tricky: evaluation without gradients but with dropout layers left in train mode, on purpose, while the BatchNorm
stays in eval mode; steps with a loss that is not finite would be skipped. A heteroscedastic Gaussian likelihood.

Class: tabular
"""
import argparse
import json
from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass(frozen=True)
class Options:
    iters: int
    seed: int
    hidden: int
    batch_size: int
    lr: float
    samples: int


class Heteroscedastic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(hidden, hidden), nn.SiLU(), nn.Dropout(0.1),
        )
        self.mean, self.log_var = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h).squeeze(1), self.log_var(h).squeeze(1).clamp(-6, 4)


def yields(count, seed):
    """Crop yields by rain, sun, soil …; the noise grows with the first column."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 6, generator=g) * 2 - 1
    clean = (3 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] ** 2
    return x, clean + (0.05 + 0.2 * (x[:, 0] > 0)) * torch.randn(count, generator=g)


def nll(mean, log_var, y):
    return 0.5 * (log_var + (y - mean) ** 2 * torch.exp(-log_var)).mean()


def predict(model, x, samples):
    """Mean and spread over `samples` passes with dropout switched on."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.no_grad():
        draws = torch.stack([model(x)[0] for _ in range(samples)])
    model.train()
    return draws.mean(0), draws.std(0)


def run(options):
    torch.manual_seed(options.seed)
    x, y = yields(800, options.seed)
    test_x, test_y = yields(100, options.seed + 1)
    model = Heteroscedastic(options.hidden)
    optimizer = torch.optim.NAdam(model.parameters(), lr=options.lr)
    losses, errors = [], []
    for it in range(1, options.iters + 1):
        rows = torch.randperm(len(x))[:options.batch_size]
        optimizer.zero_grad()
        loss = nll(*model(x[rows]), y[rows])
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        losses.append(loss.item())
        if it % max(1, options.iters // 4) == 0:
            mean, spread = predict(model, test_x, options.samples)
            errors.append((mean - test_y).square().mean().sqrt().item())
            print(f"iter {it} nll {losses[-1]:.4f} rmse {errors[-1]:.4f} mean spread {spread.mean():.4f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    return {"losses": losses, "param_sum": param_sum, "rmse": errors}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--samples", type=int, default=8, help="passes of one prediction")
    torch.set_num_threads(1)
    print("RESULT " + json.dumps(run(Options(**vars(parser.parse_args())))), flush=True)
