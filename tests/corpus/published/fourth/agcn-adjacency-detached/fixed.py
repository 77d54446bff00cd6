import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class AdaptiveGraph(nn.Module):
    """Learns how near two nodes are."""

    def __init__(self, features, width):
        super().__init__()
        self.W_phi = nn.Linear(features, width, bias=False)
        self.W_theta = nn.Linear(features, width, bias=False)

    def forward(self, x):
        similarity = self.W_phi(x) @ self.W_theta(x).transpose(1, 2)
        return F.softmax(similarity / x.shape[-1] ** 0.5, dim=-1)


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, adj):
        return self.linear(adj @ x)


class AdaptiveGCN(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.graph = AdaptiveGraph(features, width)
        self.conv1 = GraphConvolution(features, width)
        self.conv2 = GraphConvolution(width, width)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        adj = self.graph(x)
        eye = torch.eye(adj.shape[-1]).expand_as(adj)
        degree = (adj + eye).sum(-1, keepdim=True)
        adj = (adj + eye) / degree
        h = F.relu(self.conv1(x, adj))
        h = self.norm(h + F.relu(self.conv2(h, adj)))
        return self.classifier(h.mean(1))


def sample(generator, count):
    x = torch.randn(count, 6, 5, generator=generator)
    dots = (x @ x.transpose(1, 2)).masked_fill(torch.eye(6, dtype=torch.bool), -1e9)
    y = (dots.amax((1, 2)) > 4.5).long()
    return x, y


def train(model, args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    history = {"loss": [], "accuracy": []}
    for step in range(args.steps):
        x, y = sample(generator, 32)
        model.train()
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        history["loss"].append(loss.item())
        if step % 6 == 5:
            model.eval()
            with torch.no_grad():
                x, y = sample(torch.Generator().manual_seed(99), 64)
                history["accuracy"].append((model(x).argmax(1) == y).float().mean().item())
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    print("RESULT " + json.dumps(train(AdaptiveGCN(5, args.width, 2), args)))
