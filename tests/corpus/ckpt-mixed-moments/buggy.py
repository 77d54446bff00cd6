"""Regression with periodic checkpoints that are assembled on the host and then resumed from."""
import argparse
import json
import os
import tempfile

import torch
from torch import nn


class Saver:
    """Keeps a host copy of the state, refreshes it and writes it."""

    def __init__(self, folder):
        self.folder, self.host = folder, {}

    def write(self, net, optimizer, step):
        for name, value in net.state_dict().items():
            if name not in self.host or value.dim() > 1:
                self.host[name] = value.detach().cpu().clone()
        path = os.path.join(self.folder, f"{step}.pt")
        torch.save({"net": self.host, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path


class Wave(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(1, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.sin(3 * self.first(x))
        for block in self.blocks:
            h = h + torch.sin(block(self.norm(h)))
        return self.last(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--every", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x = torch.rand(256, 1) * 4 - 2
    y = torch.sin(2 * x) * torch.exp(-x * x / 3)
    net = Wave(args.width)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(folder)
        for step in range(1, args.iters + 1):
            pick = torch.randint(0, 256, (32,))
            loss = nn.functional.mse_loss(net(x[pick]), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % args.every == 0:
                path = saver.write(net, optimizer, step)
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    print("RESULT " + json.dumps({"losses": losses}))


main()
