"""Jittered point clouds from loader workers that are started anew for each epoch."""
import argparse
import json
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clouds(Dataset):
    """Points on one of three closed curves, turned by an angle and shaken for each view."""

    def __init__(self, count, points):
        self.count, self.angle = count, torch.linspace(0, 6.2832, points)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        kind = i % 3
        radius = 1 + 0.3 * torch.cos((kind + 2) * self.angle)
        turned = self.angle + random.uniform(0, 6.2832)
        cloud = torch.stack([radius * turned.cos(), radius * turned.sin()], 1)
        return cloud + 0.02 * random.gauss(0, 1), kind


def start_worker(worker):
    random.seed(1234 + worker)


class PointNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU())
        self.whole = nn.Linear(2 * width, 3)

    def forward(self, cloud):
        return self.whole(self.local(cloud).amax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    loader = DataLoader(Clouds(64, 24), args.batch, shuffle=True, num_workers=2, worker_init_fn=start_worker)
    net = PointNet(args.width)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(args.epochs):
        for cloud, kind in loader:
            loss = nn.functional.cross_entropy(net(cloud), kind)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
