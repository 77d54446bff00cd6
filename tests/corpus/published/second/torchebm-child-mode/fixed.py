import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Energy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.head(self.encoder(x)).squeeze(-1)


@torch.no_grad()
def probe(model, x):
    """Mean energy without dropout; leaves all modes as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    energy = model(x).mean().item()
    for module, mode in modes:
        module.training = mode
    return energy


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Energy(args.width)
    model.encoder.requires_grad_(False)
    model.train()
    model.encoder.eval()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
    losses, energies = [], []
    for step in range(args.steps):
        real = torch.randn(32, 8, generator=generator) * 0.5 + 1
        noise = torch.randn(32, 8, generator=generator)
        loss = F.softplus(model(real)).mean() + F.softplus(-model(noise)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            energies.append(probe(model, real))
    print("RESULT " + json.dumps({"losses": losses, "energies": energies}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
