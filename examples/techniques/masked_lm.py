"""Masked language model on data/rhymes.txt with dynamic masking (BERT and RoBERTa style).

Tricky: the masks are drawn anew for every batch, so the same text has other inputs and labels each time; 80 % of
the chosen characters become the mask, 10 % another character, 10 % stay; the loss ignores the rest. The decoder is
tied to the embedding.

Class: language
"""
import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

TEXT = Path(__file__).resolve().parents[1] / "data" / "rhymes.txt"


class Lines(Dataset):
    """Overlapping blocks of text; the collator masks them."""

    def __init__(self, text, block):
        self.alphabet = ["<mask>", *sorted(set(text))]
        ids = torch.tensor([self.alphabet.index(c) for c in text])
        self.blocks = ids.unfold(0, block, block // 4)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return self.blocks[index]


class Masking:
    def __init__(self, vocab, probability=0.2):
        self.vocab, self.probability = vocab, probability

    def __call__(self, rows):
        inputs = torch.stack(rows).clone()
        chosen = torch.rand(inputs.shape) < self.probability
        labels = inputs.masked_fill(~chosen, -100)
        dice = torch.rand(inputs.shape)
        inputs[chosen & (dice < 0.8)] = 0
        replaced = chosen & (dice >= 0.8) & (dice < 0.9)
        inputs[replaced] = torch.randint(1, self.vocab, (int(replaced.sum()),))
        return inputs, labels


class MaskedLM(nn.Module):
    def __init__(self, vocab, block, width):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(block, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x):
        return self.decoder(self.transform(self.encoder(self.tokens(x) + self.positions)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = Lines(TEXT.read_text().lower(), 32)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, collate_fn=Masking(len(data.alphabet)))
    model = MaskedLM(len(data.alphabet), 32, args.width)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    warmup = max(1, args.iters // 8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))

    losses = []
    model.train()
    while len(losses) < args.iters:
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
