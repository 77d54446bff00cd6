"""Denoising diffusion (DDPM) of two-dimensional spirals, sampled with moving-average weights.

Tricky: the loss is on noise, at random time steps, and hardly falls after a while; two copies of the weights, of
which one is only averaged; the sampler calls the network fifty times without gradients after training.

Class: generative
"""
import argparse
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Diffusion:
    """The forward process with a cosine schedule, and ancestral sampling."""

    def __init__(self, steps):
        self.steps = steps
        time = torch.linspace(0, 1, steps + 1)
        alpha_bar = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
        self.beta = (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.99)
        self.alpha_bar = torch.cumprod(1 - self.beta, 0)

    def noise(self, x, t):
        epsilon = torch.randn_like(x)
        signal = self.alpha_bar[t][:, None]
        return signal.sqrt() * x + (1 - signal).sqrt() * epsilon, epsilon

    @torch.no_grad()
    def sample(self, model, count):
        x = torch.randn(count, 2)
        for t in reversed(range(self.steps)):
            epsilon = model(x, torch.full((count,), t))
            x = (x - self.beta[t] / (1 - self.alpha_bar[t]).sqrt() * epsilon) / (1 - self.beta[t]).sqrt()
            if t:
                x = x + self.beta[t].sqrt() * torch.randn_like(x)
        return x


class Denoiser(nn.Module):
    def __init__(self, hidden, bands=8):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(bands) * 0.02)
        self.inp = nn.Linear(2, hidden)
        self.time = nn.Sequential(nn.Linear(2 * bands, hidden), nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.hidden1, self.hidden2 = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        angles = t[:, None] * self.frequencies
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1)).chunk(2, 1)
        h = F.silu(self.inp(x))
        h = h + F.silu(self.hidden1(h) * (1 + scale) + shift)
        return self.out(h + F.silu(self.hidden2(h)))


def spiral(count):
    r = torch.rand(count).sqrt() * 2
    angle = 2.2 * r + math.pi * torch.randint(0, 2, (count,))
    return torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--diffusion-steps", type=int, default=50)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    diffusion = Diffusion(args.diffusion_steps)
    model = Denoiser(args.hidden)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        t = torch.randint(0, diffusion.steps, (args.batch_size,))
        noisy, epsilon = diffusion.noise(spiral(args.batch_size), t)
        loss = F.mse_loss(model(noisy, t), epsilon)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        losses.append(loss.item())
        if it % 20 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    ema.eval()
    samples, real = diffusion.sample(ema, 200), spiral(200)
    within = (torch.cdist(samples, samples).mean() + torch.cdist(real, real).mean()) / 2
    distance = torch.cdist(samples, real).mean() - within
    param_sum = sum(p.detach().double().abs().sum().item() for p in ema.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "energy_distance": distance.item()}), flush=True)


if __name__ == "__main__":
    main()
