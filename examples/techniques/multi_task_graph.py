"""Two tasks on one graph in turn: the community of a node, and whether two nodes are linked.

Tricky: a shared encoder with two heads of which only one is used in each step, so that in every other step half of
the heads have no gradient and must not move; negative edges are drawn anew. Graph attention written with plain
tensors.

Class: tabular
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphAttention(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.source, self.target = nn.Linear(outputs, 1, bias=False), nn.Linear(outputs, 1, bias=False)

    def forward(self, x, adjacency):
        h = self.project(x)
        scores = F.leaky_relu(self.source(h) + self.target(h).T, 0.2)
        return scores.masked_fill(~adjacency, float("-inf")).softmax(1) @ h


class TwoTasks(nn.Module):
    def __init__(self, features, hidden, communities):
        super().__init__()
        self.first, self.second = GraphAttention(features, hidden), GraphAttention(hidden, hidden)
        self.heads = nn.ModuleDict({"community": nn.Linear(hidden, communities), "link": nn.Bilinear(hidden, hidden, 1)})

    def encode(self, x, adjacency):
        return self.second(F.elu(self.first(x, adjacency)), adjacency)

    def communities(self, x, adjacency):
        return self.heads["community"](self.encode(x, adjacency))

    def links(self, x, adjacency, left, right):
        h = self.encode(x, adjacency)
        return self.heads["link"](h[left], h[right]).squeeze(1)


def block_graph(nodes, communities, features, seed):
    g = torch.Generator().manual_seed(seed)
    block = torch.arange(nodes) % communities
    chance = torch.where(block[:, None] == block[None, :], 0.15, 0.015)
    upper = torch.triu(torch.rand(nodes, nodes, generator=g) < chance, 1)
    adjacency = upper | upper.T | torch.eye(nodes, dtype=torch.bool)
    x = F.one_hot(block, features).float() * 0.8 + torch.randn(nodes, features, generator=g)
    return x, block, adjacency, upper.nonzero()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=96, help="positive edges of a link step")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x, block, adjacency, edges = block_graph(160, 4, 12, args.seed)
    labelled = torch.rand(len(x)) < 0.4
    model = TwoTasks(12, args.hidden, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)

    by_task = {"community": [], "link": []}
    losses = []
    model.train()
    for it in range(args.iters):
        task = "link" if it % 2 else "community"
        optimizer.zero_grad()
        if task == "community":
            loss = F.cross_entropy(model.communities(x, adjacency)[labelled], block[labelled])
        else:
            positive = edges[torch.randint(0, len(edges), (args.batch_size,))]
            negative = torch.randint(0, len(x), (args.batch_size, 2))
            left, right = torch.cat([positive, negative]).T
            truth = torch.cat([torch.ones(args.batch_size), adjacency[negative[:, 0], negative[:, 1]].float()])
            loss = F.binary_cross_entropy_with_logits(model.links(x, adjacency, left, right), truth)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        by_task[task].append(loss.item())
        if (it + 1) % 10 == 0:
            print(f"iter {it + 1} " + " ".join(f"{k} {v[-1]:.4f}" for k, v in by_task.items()), flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = (model.communities(x, adjacency).argmax(1) == block)[~labelled].float().mean().item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
