"""Adversarial training with the fast gradient sign method on arrow images.

Tricky: a backward pass that is not for the weights (gradients of the input, taken by `torch.autograd.grad`), a
frozen-statistics forward for the attack, then the usual step on clean and attacked images together.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class ArrowNet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, channels, 3, 2, 1), nn.Conv2d(channels, 2 * channels, 3, 2, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(2 * channels)])
        self.head = nn.Linear(2 * channels * 9, 4)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = norm(layer(x)).relu()
        return self.head(x.flatten(1))


def arrows(count, seed):
    """12x12 triangles that point in one of four directions."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=g)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    tip = torch.randint(1, 4, (count, 1, 1), generator=g)
    up = ((y > tip) & ((x - 5.5).abs() < (y - tip) / 2)).float()
    images = torch.stack([up[i].rot90(int(labels[i])) for i in range(count)])
    return (images + 0.2 * torch.randn(count, 12, 12, generator=g)).unsqueeze(1), labels


def fgsm(model, images, labels, epsilon):
    """The images moved by `epsilon` along the sign of the loss's gradient."""
    model.eval()
    images = images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), images)
    model.train()
    return (images + epsilon * gradient.sign()).detach()


def robust_accuracy(model, images, labels, epsilon):
    attacked = fgsm(model, images, labels, epsilon)
    model.eval()
    with torch.no_grad():
        clean = (model(images).argmax(1) == labels).float().mean().item()
        robust = (model(attacked).argmax(1) == labels).float().mean().item()
    return clean, robust


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--epsilon", type=float, default=0.1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    images, labels = arrows(600, args.seed)
    model = ArrowNet(args.channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CyclicLR(
        optimizer, base_lr=args.lr / 10, max_lr=args.lr, step_size_up=max(1, args.iters // 4)
    )
    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        rows = torch.randint(0, len(labels), (args.batch_size,))
        x, y = images[rows], labels[rows]
        attacked = fgsm(model, x, y, args.epsilon)
        optimizer.zero_grad()
        loss = 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(attacked), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    clean, robust = robust_accuracy(model, *arrows(200, args.seed + 1), args.epsilon)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "clean": clean, "robust": robust}), flush=True)


if __name__ == "__main__":
    main()
