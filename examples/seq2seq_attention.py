"""Translate spoken numbers into digits with a GRU encoder-decoder and additive attention.

Teacher forcing with a decaying ratio, padding masked in attention and loss, one
Adam over both parts, gradient clipping, zero_grad at the end of the iteration, greedy decoding for evaluation.

Class: language
"""
import argparse
import json
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
PAD, SOS, EOS = 0, 1, 2
SOURCE = {w: i + 3 for i, w in enumerate([*ONES, *TENS[2:], "hundred", "and"])}


def spoken(n):
    if n < 20:
        return [ONES[n]]
    if n < 100:
        return [TENS[n // 10]] + ([ONES[n % 10]] if n % 10 else [])
    rest = ["and", *spoken(n % 100)] if n % 100 else []
    return [ONES[n // 100], "hundred", *rest]


class Numbers(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        n = self.numbers[i]
        source = torch.tensor([SOURCE[w] for w in spoken(n)] + [EOS])
        target = torch.tensor([int(c) + 3 for c in str(n)] + [EOS])
        return source, target


def collate(pairs):
    sources, targets = zip(*pairs)
    lengths = torch.tensor([len(s) for s in sources])
    return pad_sequence(sources, batch_first=True), lengths, pad_sequence(targets, batch_first=True)


class Encoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, padding_idx=PAD)
        self.gru = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * hidden, hidden)

    def forward(self, source, lengths):
        packed = pack_padded_sequence(self.embedding(source), lengths, batch_first=True, enforce_sorted=False)
        out, h = self.gru(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return out, torch.tanh(self.bridge(torch.cat([h[0], h[1]], dim=1)))


class AttentionDecoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, padding_idx=PAD)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(2 * hidden, hidden, bias=False)
        self.energy = nn.Linear(hidden, 1, bias=False)
        self.cell = nn.GRUCell(3 * hidden, hidden)
        self.out = nn.Linear(3 * hidden, vocab)

    def forward(self, token, h, memory, mask):
        scores = self.energy(torch.tanh(self.query(h)[:, None] + self.key(memory))).squeeze(-1)
        weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=1)
        context = torch.bmm(weights[:, None], memory).squeeze(1)
        h = self.cell(torch.cat([self.embedding(token), context], dim=1), h)
        return self.out(torch.cat([h, context], dim=1)), h


class Seq2Seq(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.encoder = Encoder(len(SOURCE) + 3, hidden)
        self.decoder = AttentionDecoder(13, hidden)

    def forward(self, source, lengths, steps, target=None, forcing=0.0):
        memory, h = self.encoder(source, lengths)
        mask = torch.arange(memory.shape[1]) < lengths[:, None]
        token = torch.full((len(source),), SOS)
        outputs = []
        for t in range(steps):
            logits, h = self.decoder(token, h, memory, mask)
            outputs.append(logits)
            teacher = target is not None and random.random() < forcing
            token = target[:, t] if teacher else logits.argmax(1)
        return torch.stack(outputs, dim=1)


@torch.no_grad()
def exact_match(model, loader):
    model.eval()
    hits = total = 0
    for source, lengths, target in loader:
        predicted = model(source, lengths, target.shape[1]).argmax(-1)
        hits += ((predicted == target) | (target == PAD)).all(1).sum().item()
        total += len(source)
    return hits / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    numbers = list(range(1000))
    random.shuffle(numbers)
    train_loader = DataLoader(Numbers(numbers[:850]), args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(Numbers(numbers[850:]), 75, collate_fn=collate)

    model = Seq2Seq(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    losses, accuracy = [], []
    it = 0
    while it < args.iters:
        for source, lengths, target in train_loader:
            model.train()
            forcing = max(0.5, 1 - it / 200)
            logits = model(source, lengths, target.shape[1], target, forcing)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            it += 1
            if it % 20 == 0 or it == args.iters:
                accuracy.append(exact_match(model, test_loader))
                print(f"iter {it} loss {loss.item():.4f} exact match {accuracy[-1]:.3f}", flush=True)
            if it == args.iters:
                break

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
