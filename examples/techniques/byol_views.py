"""Self-supervised features in the manner of BYOL: an online network predicts a slow teacher's view of the same image.

Tricky: the teacher is a copy without gradients that follows as a moving average whose momentum rises to one, there
are no negatives, and the BatchNorm of the teacher runs in train mode although it is never optimised.

Class: vision
"""
import argparse
import copy
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def encoder(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class BYOL(nn.Module):
    def __init__(self, width, projection=16):
        super().__init__()
        self.online = nn.Sequential(encoder(width), mlp(8 * width, 32, projection))
        self.predictor = mlp(projection, 32, projection)
        self.teacher = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first, second):
        with torch.no_grad():
            targets = self.teacher(second), self.teacher(first)
        predictions = self.predictor(self.online(first)), self.predictor(self.online(second))
        return sum(2 - 2 * F.cosine_similarity(p, t).mean() for p, t in zip(predictions, targets)) / 2

    @torch.no_grad()
    def follow(self, momentum):
        for slow, fast in zip(self.teacher.parameters(), self.online.parameters()):
            slow.lerp_(fast, 1 - momentum)


def flags(count, seed):
    """Tricolours: horizontal or vertical, in one of four palettes."""
    g = torch.Generator().manual_seed(seed)
    palettes = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(8))
    kinds = torch.randint(0, 8, (count,), generator=g)
    bands = torch.arange(12) // 4
    images = palettes[kinds % 4][:, :, bands].unsqueeze(-1).expand(-1, -1, -1, 12)
    return torch.where((kinds >= 4)[:, None, None, None], images.transpose(2, 3), images).contiguous(), kinds


def augment(images):
    shift = torch.randint(-2, 3, (2,)).tolist()
    light = 1 + 0.3 * torch.randn(len(images), 1, 1, 1)
    return torch.roll(images, shift, (2, 3)) * light + 0.1 * torch.randn_like(images)


def probe(features, kinds):
    """Accuracy of a nearest-centroid classifier on the features."""
    centroids = torch.stack([features[kinds == k].mean(0) for k in range(8)])
    return (torch.cdist(features, centroids).argmin(1) == kinds).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    images, kinds = flags(400, args.seed)
    model = BYOL(args.width)
    optimizer = torch.optim.AdamW([*model.online.parameters(), *model.predictor.parameters()], lr=args.lr)
    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        batch = images[torch.randperm(len(images))[:args.batch_size]]
        loss = model(augment(batch), augment(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow(1 - 0.04 * (math.cos(math.pi * it / args.iters) + 1) / 2)
        losses.append(loss.item())
        if it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = probe(model.online[0](images), kinds)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "probe": accuracy}), flush=True)


if __name__ == "__main__":
    main()
