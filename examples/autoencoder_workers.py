"""Denoising autoencoder with a binary code; data come from DataLoader worker processes.

Adagrad, a custom autograd Function (sign with a straight-through gradient), IterableDataset split over two workers with
seeds by `worker_init_fn`, persistent workers, evaluation on held-out data.

Class: signal
"""
import argparse
import json

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Waves(IterableDataset):
    """An endless stream of (noisy, clean) wave packets; each worker draws its own."""

    def __init__(self, length, noise, seed):
        self.length, self.noise = length, noise
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        t = np.linspace(0, 1, self.length)
        while True:
            centre, width, freq = self.rng.uniform([0.3, 0.1, 2], [0.7, 0.25, 5])
            clean = np.exp(-(((t - centre) / width) ** 2)) * np.cos(2 * np.pi * freq * (t - centre))
            noisy = clean + self.noise * self.rng.standard_normal(self.length)
            yield noisy.astype(np.float32), clean.astype(np.float32)


def seed_worker(worker_id):
    """Give each worker its own stream; without this every worker would yield the same samples."""
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed % 2 ** 32)


class BinarizeSTE(torch.autograd.Function):
    """Sign in the forward pass, clipped identity in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).to(grad.dtype)


class Autoencoder(nn.Module):
    def __init__(self, length, hidden, code):
        super().__init__()
        self.enc1 = nn.Linear(length, hidden)
        self.enc2 = nn.Linear(hidden, code)
        self.dec1 = nn.Linear(code, hidden)
        self.dec2 = nn.Linear(hidden, length)

    def encode(self, x):
        return BinarizeSTE.apply(self.enc2(F.elu(self.enc1(x))))

    def forward(self, x):
        return self.dec2(F.elu(self.dec1(self.encode(x))))


def evaluate(model, batch):
    noisy, clean = batch
    model.eval()
    with torch.no_grad():
        error = F.mse_loss(model(noisy), clean).item()
        used = (model.encode(noisy).mean(0).abs() < 0.98).float().mean().item()
    model.train()
    return error, used


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--code", type=int, default=24, help="bits of the code")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    length = 40
    loader = DataLoader(
        Waves(length, 0.2, args.seed), batch_size=args.batch_size, num_workers=args.workers,
        worker_init_fn=seed_worker if args.workers else None, persistent_workers=args.workers > 0,
    )
    held_out = next(iter(DataLoader(Waves(length, 0.2, args.seed + 12345), batch_size=200)))
    model = Autoencoder(length, args.hidden, args.code)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)

    losses, val = [], []
    for it, (noisy, clean) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if it % 15 == 0:
            error, used = evaluate(model, held_out)
            val.append(error)
            print(f"iter {it} loss {loss.item():.4f} held-out {error:.4f} bits in use {used:.2f}", flush=True)
        if it == args.iters:
            break

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "val": val}), flush=True)


if __name__ == "__main__":
    main()
