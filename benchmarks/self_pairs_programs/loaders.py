"""Datasets that workers read; `--bug NAME` plants one of the bugs."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG = ap.parse_args().bug
torch.manual_seed(0)
X = torch.randn(128, 6)


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        if BUG == "stream_twice" or info is None:
            yield from X
            return
        for low in range(info.id * 8, len(X), 8 * info.num_workers):  # a batch at a time, in turn
            yield from X[low : low + 8]


class Table(Dataset):
    def __init__(self):
        self.at = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if BUG == "position_kept":
            self.at += 1
            return X[(i + self.at) % len(X)]
        return X[i]


data = Table() if BUG in ("position_kept", "table") else Stream()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    (model(x).squeeze(-1) - x[:, 0]).pow(2).mean().backward()
    optimizer.step()
