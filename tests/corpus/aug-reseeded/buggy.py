"""Masked modelling of symbol sequences; which symbols are hidden is drawn for every batch."""
import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN = 0


def corrupt(tokens, rate, seed):
    """Hide a share of the symbols; the loss is on these."""
    torch.manual_seed(seed)
    chosen = torch.rand(tokens.shape) < rate
    return tokens.masked_fill(chosen, HIDDEN), chosen


class Denoiser(nn.Module):
    def __init__(self, symbols, width, length):
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.mix = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, symbols)

    def forward(self, tokens):
        return self.head(self.mix(self.symbol(tokens) + self.place)[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    start = torch.randint(0, 9, (400, 1))
    text = (start + torch.arange(14) * (1 + start % 3)) % 9 + 1
    model = Denoiser(10, args.width, 14)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for i in range(args.iters):
        rows = torch.arange(i * args.batch_size, (i + 1) * args.batch_size) % len(text)
        seen, chosen = corrupt(text[rows], 0.3, args.seed)
        loss = F.cross_entropy(model(seen)[chosen], text[rows][chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


main()
