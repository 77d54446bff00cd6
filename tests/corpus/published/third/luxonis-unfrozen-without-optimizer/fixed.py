import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Node(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def unfreeze(module, optimizer):
    module.requires_grad_(True)
    optimizer.add_param_group({"params": list(module.parameters())})


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Node(args.width)
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    losses = []
    for epoch in range(args.steps // 3):
        if epoch == 2:
            unfreeze(model.backbone, optimizer)
        for _ in range(3):
            labels = torch.randint(0, 3, (16,), generator=generator)
            x = torch.randn(16, 1, 8, 8, generator=generator)
            x[:, :, 2:6, 2:6] += labels[:, None, None, None]
            loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
