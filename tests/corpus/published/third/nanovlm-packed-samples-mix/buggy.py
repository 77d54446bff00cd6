import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


VOCAB, LENGTH = 18, 24


def pack(samples):
    """One row of several samples, with the places within each and the number of the sample."""
    ids = torch.cat(samples)[:LENGTH]
    places = torch.cat([torch.arange(len(s)) for s in samples])[:LENGTH]
    documents = torch.cat([torch.full((len(s),), i) for i, s in enumerate(samples)])[:LENGTH]
    labels = F.pad(ids[1:], (0, 1), value=-100).masked_fill(documents != F.pad(documents[1:], (0, 1), value=-1), -100)
    return ids, places, documents, labels


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, w))


class LanguageModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids, position_ids, documents):
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]).expand_as(ids))
        x = x + self.attn(self.norm1(x), mask)
        return self.head(x + self.mlp(self.norm2(x)))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)

    def row():
        samples, have = [], 0
        while have < LENGTH:
            n = int(torch.randint(4, 11, (1,), generator=generator))
            samples.append((torch.randint(0, VOCAB, (1,), generator=generator) + int(torch.randint(1, 5, (1,), generator=generator)) * torch.arange(n)) % VOCAB)
            have += n
        return pack(samples)

    model = LanguageModel(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(args.steps):
        ids, places, documents, labels = map(torch.stack, zip(*(row() for _ in range(6))))
        loss = F.cross_entropy(model(ids, places, documents).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
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
