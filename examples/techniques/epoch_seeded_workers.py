"""Augmentation in DataLoader workers whose random state is set anew each epoch.

Tricky: workers are started again for every epoch, seeded from a generator that itself is seeded with the epoch, so
that augmentations differ between epochs and workers, and yet any epoch can be repeated alone. numpy, random and
torch.

Class: vision
"""
import argparse
import json
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Dominoes(Dataset):
    """Two small dice faces side by side; the label is the sum of their eyes."""

    FACES = ([(2, 2)], [(1, 1), (3, 3)], [(1, 1), (2, 2), (3, 3)], [(1, 1), (1, 3), (3, 1), (3, 3)])

    def __init__(self, count, seed, augment):
        self.pairs = np.random.default_rng(seed).integers(0, 4, size=(count, 2))
        self.augment = augment

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        image = np.zeros((6, 11), dtype=np.float32)
        for side, face in enumerate(self.pairs[index]):
            for y, x in self.FACES[face]:
                image[y, x + 5 * side] = 1
        if self.augment:
            if random.random() < 0.5:
                image = image[:, ::-1]
            image = np.roll(image, np.random.randint(-1, 2), axis=0) + 0.1 * np.random.randn(6, 11).astype(np.float32)
        tensor = torch.from_numpy(np.ascontiguousarray(image))[None]
        return tensor * (0.9 + 0.2 * torch.rand(())) if self.augment else tensor, int(self.pairs[index].sum()) + 2


def seed_worker(worker):
    seed = torch.initial_seed() % 2 ** 32
    random.seed(seed)
    np.random.seed(seed)


def loader_for(epoch, data, batch_size, seed):
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return DataLoader(
        data, batch_size, shuffle=True, drop_last=True, num_workers=2, worker_init_fn=seed_worker, generator=generator
    )


class Counter(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.hidden = nn.Linear(channels * 6 * 11, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        return self.out(F.relu(self.hidden(F.relu(self.conv(x)).flatten(1)))).squeeze(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = Dominoes(320, args.seed, augment=True), Dominoes(100, args.seed + 1, augment=False)
    model = Counter(args.channels)
    optimizer = torch.optim.RAdam(model.parameters(), lr=args.lr)
    losses, epoch = [], 0
    while len(losses) < args.iters:
        model.train()
        for images, sums in loader_for(epoch, train_set, args.batch_size, args.seed):
            optimizer.zero_grad()
            loss = F.mse_loss(model(images), sums.float())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == args.iters:
                break
        epoch += 1
        model.eval()
        with torch.no_grad():
            right = sum((model(x).round() == y).sum().item() for x, y in DataLoader(test_set, 50))
        print(f"epoch {epoch} loss {losses[-1]:.4f} test accuracy {right / len(test_set):.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
