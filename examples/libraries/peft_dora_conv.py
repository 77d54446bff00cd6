"""Two parties of one image classifier with peft: a convolutional net trains on bars, DoRA adapters move it to rings, and their state is kept as a dictionary.

The best state so far is kept by `get_peft_model_state_dict` and put back in the end; momentum, cosine schedule, clipping.

Class: vision
"""
import argparse
import json
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
except ImportError as missing:
    print(f"peft_dora_conv needs peft: {missing}", file=sys.stderr)
    sys.exit(77)


class Net(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.out = nn.Linear(channels, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.out(F.relu(self.second(F.max_pool2d(x, 2))).mean((2, 3)))


def pictures(count, seed, rings):
    """Pictures of 12 x 12 pixels: bars that stand or lie, or rings that are narrow or wide."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    labels = torch.randint(2, (count,), generator=g)
    shift = 0.6 * torch.rand(count, 1, 1, generator=g) - 0.3
    if rings:
        shapes = ((x**2 + y**2).sqrt() - (0.35 + 0.4 * labels[:, None, None]) - 0.2 * shift).abs() < 0.15
    else:
        shapes = torch.where(labels[:, None, None] == 1, (x - shift).abs(), (y - shift).abs()) < 0.2
    return TensorDataset(shapes.float()[:, None] + 0.2 * torch.randn(count, 1, 12, 12, generator=g), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    losses = []

    def fit(model, data, test, updates, keep):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        best, done = -1.0, 0
        while done < updates:
            model.train()
            for x, y in DataLoader(data, args.batch_size, shuffle=True, drop_last=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
                done += 1
                if len(losses) % 10 == 0:
                    print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                if done == updates:
                    break
            model.eval()
            with torch.no_grad():
                x, y = test.tensors
                found = (model(x).argmax(1) == y).float().mean().item()
            if found > best:
                best = found
                keep(model)
        return best

    half = max(1, args.iters // 2)
    net = Net(args.channels)
    fit(net, pictures(512, args.seed, rings=False), pictures(64, args.seed + 9, rings=False), half, lambda model: None)
    model = get_peft_model(net, LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["first", "second", "out"]))
    kept = {}

    def keep(model):
        kept.update({name: value.clone() for name, value in get_peft_model_state_dict(model).items()})

    best = fit(model, pictures(512, args.seed + 1, rings=True), pictures(64, args.seed + 10, rings=True), args.iters - half, keep)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    set_peft_model_state_dict(model, kept)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "best": best}), flush=True)


if __name__ == "__main__":
    main()
