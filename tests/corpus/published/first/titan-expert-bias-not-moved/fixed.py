import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, width, experts, coefficient):
        super().__init__()
        self.load_balance_coeff = coefficient
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts))
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.expert_bias).topk(2, dim=-1).indices
        gate = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        with torch.no_grad():
            self.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=len(self.experts)).float()
        return sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, width, coefficient):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = MoE(width, 4, coefficient)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width, c) for c in (None, 0.02, 0.02))
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@torch.no_grad()
def update_expert_bias(model):
    for layer in model.layers:
        moe = layer.moe
        if moe.load_balance_coeff is None:
            continue
        delta = moe.load_balance_coeff * torch.sign(moe.tokens_per_expert.mean() - moe.tokens_per_expert)
        moe.expert_bias.add_(delta - delta.mean())
        moe.tokens_per_expert.zero_()


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer.register_step_pre_hook(lambda *_: update_expert_bias(model))
    losses = []
    for _ in range(args.steps):
        x = torch.randn(32, 8, generator=generator)
        loss = F.cross_entropy(model(x), (x @ law).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
