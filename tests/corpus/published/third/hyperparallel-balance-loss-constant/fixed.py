import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class SparseMLP(nn.Module):
    def __init__(self, width, experts=4, top_k=2):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)
        self.experts, self.top_k = experts, top_k

    def load_balance_loss(self, top_scores, selected):
        expert_fraction = F.one_hot(selected, self.experts).float().sum(1).mean(0) / self.top_k
        expert_prob = torch.zeros(len(selected), self.experts).scatter(1, selected, top_scores).mean(0)
        return self.experts * (expert_fraction * expert_prob).sum()

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        top_scores, selected = scores.topk(self.top_k, dim=-1)
        top_scores = top_scores / top_scores.sum(-1, keepdim=True)
        every = torch.einsum("nw,ewh->enh", x, self.up)
        every = torch.einsum("enh,ehw->enw", F.gelu(every), self.down)
        chosen = every.gather(0, selected.T[:, :, None].expand(-1, -1, x.shape[1]))
        return (chosen * top_scores.T[:, :, None]).sum(0), self.load_balance_loss(top_scores, selected)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(12, width)
        self.norm = nn.LayerNorm(width)
        self.sparse = SparseMLP(width)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        h = self.inp(x)
        more, aux = self.sparse(self.norm(h))
        return self.out(h + more), aux


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))
    model = Model(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(40, 12, generator=generator)
        logits, balance = model(x)
        task = F.cross_entropy(logits, (x @ law).argmax(1))
        loss = task + 0.1 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(task.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
