import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                grad = p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].mul(b1).add(grad, alpha=1 - b1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(grad, alpha=1 - b2)


class Mixer(nn.Module):
    def __init__(self, width, tokens=6):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.norm1, self.across = nn.LayerNorm(width), nn.Linear(tokens, tokens)
        self.norm2, self.within = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.stem(x)
        h = h + self.across(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.within(self.norm2(h))
        return self.head(h.mean(1))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(24, 3, generator=torch.Generator().manual_seed(4))
    model = Mixer(args.width)
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(32, 6, 4, generator=generator)
        loss = F.cross_entropy(model(x), (x.flatten(1) @ law).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
