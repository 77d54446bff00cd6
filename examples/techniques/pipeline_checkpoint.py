"""A WaveNet-like denoiser trained as a pipeline of segments: `checkpoint_sequential` over micro-batches.

Tricky: the network is a flat Sequential cut into segments whose activations are recomputed in backward; each update
sums the gradients of four micro-batches, as the stages of a pipeline would see them. Weight-normalised
convolutions.

Class: signal
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint_sequential


class CausalConv(nn.Module):
    def __init__(self, inputs, outputs, dilation=1):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class GatedBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.conv = CausalConv(channels, 2 * channels, dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        gate, value = self.conv(x).chunk(2, 1)
        return x + self.mix(torch.sigmoid(gate) * torch.tanh(value))


def build(channels):
    blocks = [GatedBlock(channels, 2 ** i) for i in range(4)]
    return nn.Sequential(CausalConv(1, channels), *blocks, nn.ReLU(), nn.Conv1d(channels, 1, 1))


def melodies(count, length=96):
    """Three notes in a row and the same with noise."""
    pitch = torch.randint(3, 12, (count, 3)).repeat_interleave(length // 3, 1).float()
    clean = torch.sin(torch.cumsum(6.2832 * pitch / length, 1))[:, None]
    return clean + 0.5 * torch.randn_like(clean), clean


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of an update, split into micro-batches")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--segments", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = build(args.channels)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        noisy, clean = melodies(args.batch_size)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(noisy.chunk(args.micro_batches), clean.chunk(args.micro_batches)):
            denoised = checkpoint_sequential(model, args.segments, x, use_reentrant=False)
            loss = F.mse_loss(denoised, y) * len(x) / args.batch_size
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        losses.append(total)
        if it % 10 == 0:
            print(f"iter {it} loss {total:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        noisy, clean = melodies(32)
        gain = (F.mse_loss(noisy, clean) / F.mse_loss(model(noisy), clean)).item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "noise_reduction": gain}), flush=True)


if __name__ == "__main__":
    main()
