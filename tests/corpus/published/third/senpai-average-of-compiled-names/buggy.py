import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class EMA:
    """Average of a model's parameters by name."""

    def __init__(self, model, decay=0.8):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.kept = {}

    def _clean(self, name):
        return name.removeprefix("_orig_mod.")

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            if name in self.shadow:
                self.shadow[name].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def store_and_copy(self, model):
        for name, p in model.named_parameters():
            self.kept[name] = p.detach().clone()
            p.copy_(self.shadow[name])

    @torch.no_grad()
    def restore(self, model):
        for name, p in model.named_parameters():
            p.copy_(self.kept[name])


def batch(n, generator):
    x = torch.rand(n, 3, generator=generator) * 2 - 1
    return x, (x[:, :1] * 2 + x[:, 1:2].square() - x[:, 2:]).tanh()


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    plain = nn.Sequential(nn.Linear(3, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, 1))
    ema = EMA(plain)
    model = torch.compile(plain, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    losses, held = [], []
    for step in range(args.steps):
        x, y = batch(32, generator)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(model)
        losses.append(loss.item())
        if step % 5 == 4:
            ema.store_and_copy(plain)
            plain.eval()
            with torch.no_grad():
                x, y = batch(64, torch.Generator().manual_seed(3))
                held.append(F.mse_loss(plain(x), y).item())
            plain.train()
            ema.restore(plain)
    print("RESULT " + json.dumps({"losses": losses, "held": held}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
