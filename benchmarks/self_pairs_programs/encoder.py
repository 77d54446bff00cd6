"""A classifier of padded sentences with a mask; `--bug NAME` plants one of its bugs."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG, V, D, T = ap.parse_args().bug, 30, 16, 9
torch.manual_seed(0)


class Pool(nn.Module):
    def forward(self, h, mask):
        if BUG == "mean_over_padding":
            return h.mean(1)
        return (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / D**0.5
        hidden = mask.unsqueeze(1) == 0
        if BUG == "mask_inverted":
            hidden = ~hidden & (mask.sum(1) < T).view(-1, 1, 1)
        if BUG == "mask_forgotten":
            weights = torch.softmax(scores, -1)
        elif BUG == "mask_after_softmax":
            weights = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
        else:
            weights = torch.softmax(scores.masked_fill(hidden, -1e9), -1)
        return x + weights @ self.v(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attend, self.pool, self.head = nn.Embedding(V, D), Attend(), Pool(), nn.Linear(D, 3)

    def forward(self, ids, attention_mask):
        return self.head(self.pool(self.attend(self.embed(ids), attention_mask), attention_mask))


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(6):
    ids = torch.randint(1, V, (8, T))
    mask = (torch.arange(T) < torch.randint(3, T + 1, (8, 1))).long()
    optimizer.zero_grad()
    F.cross_entropy(model(ids * mask, mask), ids[:, 0] % 3).backward()
    optimizer.step()
