"""Sharpness-aware minimisation (SAM) of an income classifier with embedded categories and numeric columns.

Tricky: two forward/backward passes before each update. The first gradient moves the weights to a worse point
nearby, the second is taken there, the weights move back, and only then the base optimizer steps.

Class: tabular
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class SAM(torch.optim.Optimizer):
    """Wraps a base optimizer; `ascend` perturbs the weights, `step` undoes that and updates."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.detach().clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()


class IncomeNet(nn.Module):
    def __init__(self, sizes, numeric, width):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.norm = nn.LayerNorm(numeric)
        self.trunk = nn.Sequential(nn.Linear(4 * len(sizes) + numeric, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, categories, numbers):
        parts = [table(column) for table, column in zip(self.embeddings, categories.unbind(1))]
        return self.trunk(torch.cat([*parts, self.norm(numbers)], dim=1)).squeeze(1)


def people(count, sizes, seed):
    g = torch.Generator().manual_seed(seed)
    categories = torch.stack([torch.randint(0, size, (count,), generator=g) for size in sizes], dim=1)
    numbers = torch.randn(count, 5, generator=g)
    effects = [torch.randn(size, generator=torch.Generator().manual_seed(7 + i)) for i, size in enumerate(sizes)]
    score = sum(effect[column] for effect, column in zip(effects, categories.unbind(1)))
    score = score + numbers[:, 0] * numbers[:, 1] + numbers[:, 2]
    return categories, numbers, (score + 0.3 * torch.randn(count, generator=g) > 0).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rho", type=float, default=0.05, help="radius of the perturbation")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    sizes = (9, 16, 7, 5)
    categories, numbers, rich = people(1200, sizes, args.seed)
    model = IncomeNet(sizes, 5, args.width)
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=args.rho, lr=args.lr, momentum=0.9)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        rows = torch.randint(0, len(rich), (args.batch_size,))
        batch = categories[rows], numbers[rows]
        loss = F.binary_cross_entropy_with_logits(model(*batch), rich[rows])
        loss.backward()
        optimizer.ascend()
        F.binary_cross_entropy_with_logits(model(*batch), rich[rows]).backward()
        optimizer.step()
        losses.append(loss.item())
        if it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    model.eval()
    categories, numbers, rich = people(400, sizes, args.seed + 1)
    with torch.no_grad():
        accuracy = ((model(categories, numbers) > 0).float() == rich).float().mean().item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
