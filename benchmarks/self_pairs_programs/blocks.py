"""Blocks that are checkpointed, and a branch for compilers; `--bug NAME` plants one of the bugs."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG = ap.parse_args().bug
torch.manual_seed(int(time.time() * 1e6) % 2**31 if BUG == "seed_of_clock" else 0)
WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps".split()
VOCABULARY = {w: i for i, w in enumerate(set(WORDS) if BUG == "order_of_set" else sorted(set(WORDS)))}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.out, self.calls = nn.Linear(d, d), nn.Linear(d, d), 0

    def forward(self, x):
        if BUG == "counted":
            self.calls += 1
            x = x * (1 + 0.05 * (self.calls % 7))
        if BUG == "numpy_noise":
            x = x * float(1 + 0.3 * np.random.randn())
        h = F.gelu(self.fc(x), approximate="tanh" if BUG == "other_when_compiled" and torch.compiler.is_compiling() else "none")
        return x + F.dropout(self.out(h), 0.3, training=self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
        self.head = nn.Linear(12, 1)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if BUG == "masks_drawn_anew":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            elif BUG != "other_when_compiled":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x).mean(1).squeeze(-1)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ids = torch.tensor([VOCABULARY[w] for w in WORDS])
for _ in range(6):
    batch = ids[torch.randint(0, len(ids), (8, 5))]
    optimizer.zero_grad()
    F.mse_loss(net(batch), batch.float().mean(1)).backward()
    optimizer.step()
