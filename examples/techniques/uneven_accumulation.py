"""Gradient accumulation with uneven batches: sums of token losses, divided by the number of tokens at the update.

Tricky: micro-batches have different numbers of tokens, the last group of an epoch is smaller than the others, and
the gradients are scaled in place between backward and step. A bidirectional GRU tagger of generated sentences.

Class: language
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

TAGS = {"DET": ["the", "a"], "ADJ": ["old", "small", "green", "fast"], "NOUN": ["dog", "train", "light", "saw", "run"],
        "VERB": ["saw", "run", "light", "took"], "END": ["."]}
WORDS = {w: i + 1 for i, w in enumerate(sorted({w for ws in TAGS.values() for w in ws}))}
TAG_IDS = {tag: i for i, tag in enumerate(TAGS)}


def sentence(g):
    """A noun phrase, a verb, a noun phrase, end; some words are nouns or verbs by their place."""
    def pick(tag):
        return TAGS[tag][int(torch.randint(0, len(TAGS[tag]), (), generator=g))], tag

    def phrase():
        adjectives = [pick("ADJ") for _ in range(int(torch.randint(0, 4, (), generator=g)))]
        return [pick("DET"), *adjectives, pick("NOUN")]

    pairs = [*phrase(), pick("VERB"), *phrase(), pick("END")]
    return torch.tensor([WORDS[w] for w, _ in pairs]), torch.tensor([TAG_IDS[t] for _, t in pairs])


def collate(rows):
    rows = sorted(rows, key=lambda row: -len(row[0]))
    lengths = torch.tensor([len(words) for words, _ in rows])
    return pad_sequence([w for w, _ in rows], True), pad_sequence([t for _, t in rows], True, -1), lengths


class Tagger(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS) + 1, hidden, padding_idx=0)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, len(TAGS))

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True)
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def groups(loader, size):
    """Lists of up to `size` micro-batches; the last one of an epoch may be shorter."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=16, help="sentences of one micro-batch")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--accumulate", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    g = torch.Generator().manual_seed(args.seed)
    loader = DataLoader([sentence(g) for _ in range(150)], batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model = Tagger(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    losses = []
    model.train()
    while len(losses) < args.iters:
        for group in groups(loader, args.accumulate):
            optimizer.zero_grad()
            total = tokens = 0
            for words, tags, lengths in group:
                logits = model(words, lengths).flatten(0, 1)
                loss = F.cross_entropy(logits, tags.flatten(), ignore_index=-1, reduction="sum")
                loss.backward()
                total += loss.item()
                tokens += int(lengths.sum())
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.div_(tokens)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            losses.append(total / tokens)
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f} tokens {tokens} micro-batches {len(group)}", flush=True)
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
