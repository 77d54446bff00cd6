"""Crops and brightness drawn from a generator that the dataset holds; loaded by two worker processes."""
import argparse
import json

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Patches(Dataset):
    def __init__(self, count, side, seed):
        rng = np.random.RandomState(seed)
        self.label = rng.randint(0, 3, count)
        ramp = np.linspace(-1, 1, side + 4)
        self.image = np.stack([np.outer(np.cos(3 * (k + 1) * ramp), np.sin(2 * (k + 1) * ramp)) for k in self.label])
        self.image += 0.3 * rng.randn(*self.image.shape)
        self.side = side
        self.random = np.random.RandomState(seed)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        top, left = self.random.randint(0, 5, 2)
        patch = self.image[i, top : top + self.side, left : left + self.side] * self.random.uniform(0.8, 1.2)
        return torch.tensor(patch, dtype=torch.float32)[None], int(self.label[i])


def own_stream(worker):
    info = get_worker_info()
    info.dataset.random = np.random.RandomState(info.seed % 2**32)


class Net(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(channels, channels, 3, padding=1), nn.GELU()
        )
        self.out = nn.Linear(channels, 3)

    def forward(self, x):
        return self.out(self.features(x).mean((2, 3)))


parser = argparse.ArgumentParser()
parser.add_argument("--iters", type=int, default=14)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--channels", type=int, default=8)
parser.add_argument("--workers", type=int, default=2)

if __name__ == "__main__":
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = Patches(96, 12, args.seed)
    loader = DataLoader(data, batch_size=12, shuffle=True, num_workers=args.workers, worker_init_fn=own_stream)
    net = Net(args.channels)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
    losses = []
    while len(losses) < args.iters:
        for image, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(image), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == args.iters:
                break
    print("RESULT " + json.dumps({"losses": losses}))
