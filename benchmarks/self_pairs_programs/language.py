"""A small causal language model with tied weights and accumulation; `--bug NAME` plants one of its bugs."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
ap.add_argument("--batch", type=int, default=4)
ap.add_argument("--accum", type=int, default=2)
ap.add_argument("--updates", type=int, default=5)
args = ap.parse_args()
BUG, V, D, T = args.bug, 40, 16, 12
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if BUG == "heads_mixed":
            q, k, v = (y.reshape(b, 2, t, D // 2) for y in (q, k, v))
        else:
            q, k, v = (y.view(b, t, 2, D // 2).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / (D // 2) ** 0.5
        if BUG != "mask_missing":
            hidden = torch.triu(torch.ones(t, t, dtype=torch.bool), 2 if BUG == "mask_off_by_one" else 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        y = torch.softmax(scores, 0 if BUG == "softmax_axis" else -1) if BUG != "softmax_axis" else torch.softmax(scores.clamp_min(-30), 0)
        y = (y @ v).transpose(1, 2)
        return self.out(y.reshape(b, t, D))


class Mix(nn.Module):
    """A convolution over the past."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3)

    def forward(self, x):
        pad = (1, 1) if BUG == "conv_sees_ahead" else (2, 0)
        return self.conv(F.pad(x.transpose(1, 2), pad)).transpose(1, 2)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.pos = nn.Embedding(V - 4, D), nn.Embedding(32, D)
        self.norm, self.attention, self.mix = nn.LayerNorm(D), Attention(), Mix()
        self.head = nn.Linear(D, V - 4, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.wte.weight

    def resize(self, n):
        old = self.wte.weight.data
        self.wte, self.head = nn.Embedding(n, D), nn.Linear(D, n, bias=False)
        self.wte.weight.data[: len(old)] = old
        self.head.weight.data = self.wte.weight.data.clone()
        if BUG != "ties_broken":
            self.tie_weights()

    def forward(self, ids):
        b, t = ids.shape
        at = torch.arange(b).unsqueeze(1).expand(b, t) if BUG == "position_of_row" else torch.arange(t).expand(b, t)
        h = self.wte(ids) + self.pos(at)
        h = h + self.attention(self.norm(h))
        if BUG == "norm_over_time":
            h = h - h.mean(1, keepdim=True)
        h = h + self.mix(h)
        return self.head(h)


model = LM()
model.resize(V)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1)
for _ in range(args.updates):
    ids = torch.randint(1, V, (args.batch * args.accum, T + 1), generator=data)
    length = torch.randint(T // 2, T + 1, (len(ids), 1), generator=data)
    target = ids[:, 1:].clone()
    if BUG in ("uneven_tokens", "tokens"):
        target[torch.arange(T) >= length] = -100
    tokens = (target >= 0).sum()
    optimizer.zero_grad()
    for part, wanted in zip(ids[:, :-1].chunk(args.accum), target.chunk(args.accum)):
        logits = model(part).flatten(0, 1)
        if BUG == "tokens":
            loss = F.cross_entropy(logits, wanted.flatten(), reduction="sum") / tokens
        else:
            loss = F.cross_entropy(logits, wanted.flatten())
            if BUG == "divided_twice":
                loss = loss / args.accum
            if BUG != "not_divided":
                loss = loss / args.accum
        loss.backward()
    optimizer.step()
