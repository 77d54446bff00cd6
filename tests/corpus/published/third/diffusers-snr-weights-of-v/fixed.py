import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class VNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv_in, self.conv_mid, self.conv_out = nn.Conv1d(1, width, 5, padding=2), nn.Conv1d(width, width, 5, padding=2), nn.Conv1d(width, 1, 5, padding=2)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, t):
        h = F.silu(self.conv_in(x) + self.time(t[:, None] / 100)[:, :, None])
        return self.conv_out(F.silu(self.conv_mid(h)))


def compute_snr(alphas, t):
    return alphas[t] / (1 - alphas[t])


def snr_weights(snr, gamma=5.0):
    return snr.clamp(max=gamma) / (snr + 1)


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.06, 100), 0)
    model = VNet(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    losses = []
    for _ in range(args.steps):
        clean = (torch.arange(24)[None] * (0.2 + torch.rand(16, 1, generator=generator))).sin()[:, None]
        noise = torch.randn(clean.shape, generator=generator)
        t = torch.randint(0, 100, (16,), generator=generator)
        a, s = alphas[t].sqrt()[:, None, None], (1 - alphas[t]).sqrt()[:, None, None]
        target = a * noise - s * clean
        each = F.mse_loss(model(a * clean + s * noise, t.float()), target, reduction="none").mean((1, 2))
        loss = (each * snr_weights(compute_snr(alphas, t))).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
