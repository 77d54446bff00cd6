"""Keyword spotting that stops half-way, and goes on from its checkpoint with new objects.

Tricky: the second half has a new model, optimizer and scheduler, loaded with weights, moments, step counts and
random states; it must go on exactly as an uninterrupted run would. Depthwise convolutions, AdamW, a step schedule.

Class: signal
"""
import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


def keywords(count, seed):
    """Each of six words is a sequence of three tones out of four; 24 frames of 10 noisy filter banks."""
    g = torch.Generator().manual_seed(seed)
    words = torch.tensor([[0, 1, 2], [2, 1, 0], [3, 0, 3], [1, 3, 2], [0, 2, 3], [3, 2, 1]])
    labels = torch.randint(0, len(words), (count,), generator=g)
    tones = words[labels].repeat_interleave(8, dim=1)
    bank = torch.arange(10.0)[None, :, None]
    frames = torch.exp(-((bank - 2.5 * tones[:, None] - 1) ** 2) / 2)
    return frames + 0.3 * torch.randn(frames.shape, generator=g), labels


class DepthwiseBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, 5, padding=2, groups=channels)
        self.pointwise = nn.Conv1d(channels, channels, 1)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.pointwise(self.depthwise(x))))


class Spotter(nn.Module):
    def __init__(self, channels, words=6):
        super().__init__()
        self.stem = nn.Conv1d(10, channels, 3, padding=1)
        self.blocks = nn.Sequential(DepthwiseBlock(channels), DepthwiseBlock(channels))
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(3 * channels, words)

    def forward(self, x):
        h = F.adaptive_avg_pool1d(self.blocks(self.stem(x)), 3)
        return self.classifier(self.dropout(h.flatten(1)))


class Session:
    """What a training process owns; `save` and `load` are its checkpoint."""

    def __init__(self, args):
        self.args = args
        self.model = Spotter(args.channels)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 8, gamma=0.7)
        self.losses = []

    def train(self, data, until):
        frames, labels = data
        self.model.train()
        while len(self.losses) < until:
            rows = torch.randint(0, len(labels), (self.args.batch_size,))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(frames[rows]), labels[rows])
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
            if len(self.losses) % 10 == 0:
                print(f"iter {len(self.losses)} loss {loss.item():.4f}", flush=True)

    def save(self, path):
        torch.save({
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(), "losses": self.losses, "rng": torch.get_rng_state(),
        }, path)

    def load(self, path):
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.losses = checkpoint["losses"]
        torch.set_rng_state(checkpoint["rng"])
        return self


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = keywords(600, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        session = Session(args)
        session.train(data, args.iters // 2)
        session.save(path)
        del session
        print(f"resume from iteration {args.iters // 2}", flush=True)
        session = Session(args).load(path)
        session.train(data, args.iters)
    param_sum = sum(p.detach().double().abs().sum().item() for p in session.model.parameters())
    print("RESULT " + json.dumps({"losses": session.losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
