"""Vector quantisation whose codebook follows the encoder by moving averages."""
import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Codebook(nn.Module):
    def __init__(self, codes, width, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("uses", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, len(self.codes)).to(z.dtype)
                self.uses.mul_(self.decay).add_(hits.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(hits.T @ z, alpha=1 - self.decay)
                self.codes.copy_(self.sums / self.uses.clamp(min=1e-3)[:, None])
        code = self.codes[nearest]
        return z + (code - z).detach(), F.mse_loss(z, code)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enc = nn.Linear(16, width)
        self.vq = Codebook(8, width)
        self.dec = nn.Linear(width, 16)

    def forward(self, x):
        z, pull = self.vq(self.enc(x))
        return F.mse_loss(self.dec(z), x) + 0.25 * pull


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    centres = torch.randn(8, 16) * 2
    model = Model(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(args.iters):
        x = centres[torch.randint(0, 8, (32,))] + 0.1 * torch.randn(32, 16)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


main()
