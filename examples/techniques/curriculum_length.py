"""Length curriculum: a GRU language model of data/rhymes.txt whose windows grow from 6 to 24 characters.

Tricky: batch shapes change during the run, and with them the batch size, which keeps the number of characters about
constant; the input and output embeddings are tied; the learning rate restarts when the length grows.

Class: language
"""
import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

TEXT = Path(__file__).resolve().parents[1] / "data" / "rhymes.txt"


class TiedGRU(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocab))
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, tokens):
        states, _ = self.gru(self.embed(tokens))
        return F.linear(states, self.embed.weight, self.bias)


def windows(ids, count, length):
    starts = torch.randint(0, len(ids) - length - 1, (count, 1))
    rows = ids[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def length_at(iteration, total, lengths=(6, 9, 15, 24)):
    return lengths[len(lengths) * iteration // total]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=48, help="rows of the shortest length")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = TEXT.read_text().lower()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    model = TiedGRU(len(alphabet), args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=max(1, -(-args.iters // 4)), eta_min=args.lr / 10)

    losses, lengths = [], []
    for it in range(args.iters):
        length = length_at(it, args.iters)
        inputs, targets = windows(ids, max(2, 6 * args.batch_size // length), length)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        lengths.append(length)
        if (it + 1) % 10 == 0:
            print(f"iter {it + 1} length {length} rows {len(inputs)} loss {losses[-1]:.4f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "lengths": lengths}), flush=True)


if __name__ == "__main__":
    main()
