import argparse
import json

import torch
from torch import nn


class RegularBlock(nn.Module):
    """Two maps of edge features and their matrix product."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mlp1 = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 1))
        self.mlp2 = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 1))
        self.skip = nn.Conv2d(inputs + outputs, outputs, 1)
        self.norm = nn.GroupNorm(1, outputs)

    def forward(self, x):
        product = self.mlp1(x) @ self.mlp2(x) / x.shape[-1]
        return self.norm(self.skip(torch.cat([x, product], 1)))


class NodeEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block1 = RegularBlock(2, width)
        self.block2 = RegularBlock(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, graph):
        return self.last(self.block2(self.block1(graph)).amax(-1).transpose(1, 2))


class Siamese(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.node_embedder = NodeEmbedding(width)

    def forward(self, g1, g2):
        return self.node_embedder(g1) @ self.node_embedder(g2).transpose(1, 2)


class triplet_loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(reduction="mean")

    def forward(self, outputs):
        outputs = torch.softmax(outputs, -1)
        total = 0
        for out in outputs:
            total = total + self.loss(out, torch.arange(out.shape[0]))
        return total / len(outputs)


def graph_tensor(adjacency):
    degree = torch.diag_embed(adjacency.sum(-1))
    return torch.stack([adjacency, degree], 1)


def make_pair(count, nodes, noise, generator):
    base = (torch.rand(count, nodes, nodes, generator=generator) < 0.4).float().triu(1)
    base = base + base.transpose(1, 2)
    flip = (torch.rand(count, nodes, nodes, generator=generator) < noise).float().triu(1)
    flip = flip + flip.transpose(1, 2)
    return graph_tensor(base), graph_tensor((base - flip).abs())


class Siamese_Node_Exp:
    def __init__(self, width, lr):
        self.model = Siamese(width)
        self.loss = triplet_loss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr, amsgrad=False)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=2)

    def training_step(self, batch):
        loss = self.loss(self.model(*batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, steps, seed):
        generator = torch.Generator().manual_seed(seed + 1)
        losses = []
        for step in range(steps):
            losses.append(self.training_step(make_pair(6, 10, 0.05, generator)))
            if step % 8 == 7:
                self.scheduler.step(sum(losses[-8:]) / 8)
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    print("RESULT " + json.dumps({"losses": Siamese_Node_Exp(args.width, 2e-3).fit(args.steps, args.seed)}))
