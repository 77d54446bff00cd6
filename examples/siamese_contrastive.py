"""Contrastive representation learning with a momentum encoder and a queue of negatives (MoCo style).

A query encoder trained by SGD, a key encoder that follows it as a moving average and never gets gradients, two random
augmentations of every sample, a FIFO queue kept as a buffer. A linear probe measures the representation at the end.

Class: signal
"""
import argparse
import copy
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def signals(count, seed, length=48, classes=4):
    """One-dimensional signals; the class is the waveform, pitch and overtone vary from sample to sample."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=g)
    t = torch.linspace(0, 2 * math.pi, length)
    pitch = 1 + 4 * torch.rand(count, 1, generator=g)
    overtone = torch.rand(count, 1, generator=g)
    u = t * pitch + 2 * math.pi * torch.rand(count, 1, generator=g)
    shapes = torch.stack([u.sin(), u.sin().sign(), 2 / math.pi * u.sin().asin(), u.sin() * (3 * u).sin()])
    return shapes[labels, torch.arange(count)] + overtone * torch.sin(7 * t), labels


class TwoViews(Dataset):
    """Each item is two independent augmentations (roll, scale, noise) of one signal."""

    def __init__(self, x):
        self.x = x

    @staticmethod
    def augment(x):
        x = torch.roll(x, int(torch.randint(0, len(x), ())))
        return x * (0.7 + 0.6 * torch.rand(())) + 0.08 * torch.randn_like(x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.augment(self.x[i]), self.augment(self.x[i])


class Encoder(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.GroupNorm(1, width), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(width, 2 * width, 5, padding=2), nn.GroupNorm(1, 2 * width), nn.ReLU(), nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Linear(4 * width, out)
        )

    def forward(self, x):
        return F.normalize(self.projector(self.trunk(x[:, None])), dim=1)


class MoCo(nn.Module):
    def __init__(self, width, out=16, queue=256, momentum=0.95, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.encoder_q = Encoder(width, out)
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(queue, out), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for k, q in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
            k.mul_(self.momentum).add_(q, alpha=1 - self.momentum)

    @torch.no_grad()
    def _enqueue(self, keys):
        index = (self.pointer + torch.arange(len(keys))) % len(self.queue)
        self.queue[index] = keys
        self.pointer.add_(len(keys)).remainder_(len(self.queue))

    @torch.no_grad()
    def fill_queue(self, x):
        """Start from real keys: random directions would be told apart at a glance."""
        self.queue.copy_(self.encoder_k(x[: len(self.queue)]))

    def forward(self, view_q, view_k):
        q = self.encoder_q(view_q)
        with torch.no_grad():
            self._momentum_update()
            k = self.encoder_k(view_k)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().t()
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        self._enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def linear_probe(encoder, x, y):
    """Closed-form ridge classifier on frozen features: train on the first half, score on the second."""
    encoder.eval()
    with torch.no_grad():
        features = encoder.trunk(x[:, None])
    features = torch.cat([features, torch.ones(len(x), 1)], dim=1)
    half = len(x) // 2
    a, b = features[:half], F.one_hot(y[:half]).float()
    w = torch.linalg.solve(a.t() @ a + 0.1 * torch.eye(a.shape[1]), a.t() @ b)
    return ((features[half:] @ w).argmax(1) == y[half:]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.03)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x, y = signals(800, args.seed)
    loader = DataLoader(TwoViews(x), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = MoCo(args.width)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    before = linear_probe(model.encoder_q, x, y)
    model.train()
    model.fill_queue(x)

    losses = []
    epoch = 0
    while len(losses) < args.iters:
        epoch += 1
        model.train()
        for view_q, view_k in loader:
            if len(losses) >= args.iters:
                break
            loss = model(view_q, view_k)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"epoch {epoch} iter {len(losses)} loss {loss.item():.4f}", flush=True)

    after = linear_probe(model.encoder_q, x, y)
    print(f"linear probe {before:.3f} before, {after:.3f} after", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "probe": [before, after]}), flush=True)


if __name__ == "__main__":
    main()
