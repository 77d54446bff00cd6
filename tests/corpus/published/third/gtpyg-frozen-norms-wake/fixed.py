import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.around = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, adjacency):
        return F.relu(self.norm(self.own(x) + self.around(adjacency @ x)))


class GraphNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.convs = nn.ModuleList(Conv(width) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.frozen = []

    def freeze(self):
        """The encoder no longer learns, and its norms keep their statistics."""
        self.frozen = [self.embed, *self.convs]
        for module in self.frozen:
            module.requires_grad_(False)
            module.eval()

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, x, adjacency, graph, graphs):
        h = self.embed(x)
        for conv in self.convs:
            h = h + conv(h, adjacency)
        pooled = torch.zeros(graphs, h.shape[1]).index_add(0, graph, h)
        return self.head(pooled).squeeze(1)


def batch(generator, graphs=6, nodes=7, shift=0.0):
    x = torch.randn(graphs * nodes, 5, generator=generator) + shift
    graph = torch.arange(graphs).repeat_interleave(nodes)
    adjacency = (torch.rand(len(x), len(x), generator=generator) < 0.4).float() * (graph[:, None] == graph[None])
    adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    target = torch.zeros(graphs).index_add(0, graph, (adjacency @ x)[:, 0].sin())
    return x, adjacency, graph, graphs, target


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = GraphNet(args.width)
    with torch.no_grad():  # statistics of a training before this one
        for _ in range(20):
            model(*batch(generator)[:4])
    model.freeze()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses, held = [], []
    for _ in range(args.steps // 4):
        model.train()
        for _ in range(4):
            *inputs, target = batch(generator, shift=0.5)
            loss = F.smooth_l1_loss(model(*inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            *inputs, target = batch(torch.Generator().manual_seed(8), shift=0.5)
            held.append(F.smooth_l1_loss(model(*inputs), target).item())
    print("RESULT " + json.dumps({"losses": losses, "held": held}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
