import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


def add_rounded(parameter, exact):
    """Store float32 values in a bfloat16 parameter, rounded up or down by chance."""
    bits = exact.view(torch.int32)
    bits = (bits + torch.randint_like(bits, 0, 1 << 16)) & -65536
    parameter.copy_(bits.view(torch.float32))


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                grad = p.grad.float()
                state["m"].lerp_(grad, 1 - b1)
                state["v"].lerp_(grad * grad, 1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                exact = p.float()
                exact.mul_(1 - group["lr"] * group["weight_decay"])
                add_rounded(p, exact - group["lr"] * m / (v.sqrt() + group["eps"]))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    model = nn.Sequential(nn.Linear(8, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, 6)).to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(32, 8, generator=generator)
        loss = F.cross_entropy(model(x.bfloat16()).float(), (x @ law).argmax(1))
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
