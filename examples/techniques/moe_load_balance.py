"""Mixture of experts: a word-level language model of data/logbook.txt with top-1 routing and a load-balancing loss.

Tricky: each expert sees another number of tokens in every step, perhaps none, and then has no gradient; the router
learns through the gate's probability and the auxiliary loss; overflowing tokens skip the experts by the residual
path.

Class: language
"""
import argparse
import json
import re
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = Path(__file__).resolve().parents[1] / "data" / "logbook.txt"


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SwitchLayer(nn.Module):
    """Top-1 routing (Switch Transformer); `balance` is the auxiliary loss of the last forward."""

    def __init__(self, dim, experts, capacity=1.5):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))
        self.capacity = capacity

    def forward(self, x):
        flat = x.flatten(0, -2)
        probabilities = self.router(flat).softmax(-1)
        gate, choice = probabilities.max(-1)
        share = F.one_hot(choice, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        self.share = share.detach()
        limit = int(self.capacity * len(flat) / len(self.experts))
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(1)[:limit]
            if len(rows):
                out = out.index_add(0, rows, gate[rows, None] * expert(flat[rows]))
        return out.view_as(x)


class MoELM(nn.Module):
    def __init__(self, vocab, dim, experts, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, context)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.moe = SwitchLayer(dim, experts)
        self.out = nn.Linear(dim, vocab)
        self.context = context

    def forward(self, words):
        h = self.embed(words)
        past = F.pad(h.transpose(1, 2), (self.context - 1, 0))
        h = self.norm1(h + self.mix(past).transpose(1, 2))
        return self.out(self.norm2(h + self.moe(h)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the load-balancing loss")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    words = re.findall(r"[a-z']+|[.,;]", TEXT.read_text().lower())
    vocabulary = {w: i for i, w in enumerate(sorted(set(words)))}
    ids = torch.tensor([vocabulary[w] for w in words])
    model = MoELM(len(vocabulary), args.dim, args.experts, context=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        rows = ids[torch.randint(0, len(ids) - 17, (args.batch_size, 1)) + torch.arange(17)]
        task = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss = task + args.balance * model.moe.balance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(task.item())
        if it % 10 == 0:
            print(f"iter {it} loss {task.item():.4f} shares {[round(s, 2) for s in model.moe.share.tolist()]}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
