import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.to_q = nn.Linear(10, width)
        self.to_k = nn.Linear(width, width)
        self.norm_out = nn.LayerNorm(width)
        self.proj_out = nn.Linear(width, 10)

    def forward(self, noisy, t):
        return self.proj_out(self.norm_out(F.gelu(self.to_k(F.gelu(self.to_q(noisy))) + t)))

    def add_adapter(self, targets, modules_to_save=()):
        self.requires_grad_(False)
        for name in targets:
            setattr(self, name, LoRALinear(getattr(self, name)))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Denoiser(args.width)
    model.add_adapter(["to_q", "to_k"], modules_to_save=["proj_out"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-3)
    losses = []
    for _ in range(args.steps):
        clean = torch.sin(torch.rand(16, 1, generator=generator) * 3 + torch.arange(10) / 3)
        t = torch.rand(16, 1, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        loss = F.mse_loss(model((1 - t) * clean + t * noise, t), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
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
