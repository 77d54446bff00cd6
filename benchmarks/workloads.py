"""The programs that overhead is measured on: three of sizes as in the peer's figures (findings/traincheck.md), and two that call a small model hundreds of times a step.

    python workloads.py NAME STEPS [BLOCK]

Prints `TIMES [[on, wall, cpu], …]`, one entry a block of BLOCK steps: whether recording was on, and seconds of wall clock
and of CPU time of the whole process per step. Under `proctor record` every second block runs with recording paused:
all taps still stand, and pass through. So both halves of a pair see the same process on the same machine at the same time.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Cnn(nn.Module):
    """The CNN of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.drop1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(x)))), dim=1)


class Gcn(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(torch.sparse.mm(adjacency, self.w1(x))), 0.5, self.training)
        return F.log_softmax(torch.sparse.mm(adjacency, self.w2(x)), dim=1)


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, d // 4).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Lm(nn.Module):
    def __init__(self, vocab: int, d: int, layers: int) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(128, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Blocks:
    """Times blocks of steps and switches recording on and off between them."""

    def __init__(self, steps: int, size: int) -> None:
        self.steps, self.size, self.done = steps, size, 0
        self.times: list[tuple[bool, float, float]] = []
        attach = sys.modules.get("proctor.instrument.attach")
        self.observer = attach._observer if attach is not None else None
        self.on = self.observer is not None
        self._begin()

    def _begin(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def step(self) -> bool:
        """Call at the end of each step; false when there were enough."""
        self.done += 1
        if self.done % self.size == 0:
            if self.on:
                self.observer.writer.flush()  # what the block recorded is paid for by the block
            now = time.perf_counter(), time.process_time()
            self.times.append((self.on, (now[0] - self.began[0]) / self.size, (now[1] - self.began[1]) / self.size))
            if self.observer is not None:
                self.on = not self.on
                self.observer.pause(not self.on)
            self._begin()
        return self.done < self.steps


def mnist(steps: int, size: int) -> Blocks:
    data = TensorDataset(torch.randn(64 * 40, 1, 28, 28), torch.randint(0, 10, (64 * 40,)))
    model = Cnn()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    blocks = Blocks(steps, size)
    model.train()
    while True:
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if not blocks.step():
                return blocks


def gcn(steps: int, size: int) -> Blocks:
    n, features = 2708, 1433  # Cora's size
    edges = torch.randint(0, n, (2, 10_556))
    adjacency = torch.sparse_coo_tensor(edges, torch.full((edges.shape[1],), 0.2), (n, n)).coalesce()
    x, y = (torch.rand(n, features) < 0.01).float(), torch.randint(0, 7, (n,))
    model = Gcn(features, 16, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    blocks = Blocks(steps, size)
    while True:
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adjacency)[:140], y[:140])
        loss.backward()
        optimizer.step()
        if not blocks.step():
            return blocks


def transformer(steps: int, size: int) -> Blocks:
    ids = torch.randint(0, 256, (64 * 1024,))
    model = Lm(256, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    blocks = Blocks(steps, size)
    while True:
        at = torch.randint(0, len(ids) - 97, (32,))
        x = torch.stack([ids[i : i + 96] for i in at])
        y = torch.stack([ids[i + 1 : i + 97] for i in at])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not blocks.step():
            return blocks


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 128), nn.Linear(128, 8)

    def forward(self, t: float, z: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(z).relu()).tanh()


def solver(steps: int, size: int) -> Blocks:
    """A differential equation: its model is called at each of 200 times, and gradients go through all of them."""
    model, x = Field(), torch.randn(32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    blocks = Blocks(steps, size)
    while True:
        optimizer.zero_grad()
        z = x
        for i in range(200):
            z = z + model(i / 200, z) / 200
        z.square().mean().backward()
        optimizer.step()
        if not blocks.step():
            return blocks


def acting(steps: int, size: int) -> Blocks:
    """A policy: it acts 200 times without gradients, and learns from what it saw."""
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    blocks = Blocks(steps, size)
    while True:
        seen, state = [], torch.randn(1, 8)
        for _ in range(200):
            with torch.no_grad():
                action = policy(state).argmax(1)
            seen.append((state, action))
            state = torch.randn(1, 8) + 0.1 * action
        states, actions = (torch.cat(parts) for parts in zip(*seen))
        optimizer.zero_grad()
        F.cross_entropy(policy(states), actions).backward()
        optimizer.step()
        if not blocks.step():
            return blocks


def main() -> None:
    name, steps, size = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["5"])[0])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = {"mnist": mnist, "gcn": gcn, "transformer": transformer, "solver": solver, "acting": acting}[name](steps, size)
    print("TIMES " + json.dumps(blocks.times))


if __name__ == "__main__":
    main()
