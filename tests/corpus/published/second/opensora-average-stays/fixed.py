import argparse
import copy
import json

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def batch(generator, size=16):
    y = torch.randint(0, 4, (size,), generator=generator)
    x = torch.randn(size, 1, 6, 6, generator=generator) + 2.0
    for i in range(size):
        x[i, 0, y[i]] += 2.0
    return x, y


class EMAModel:
    def __init__(self, parameters, decay=0.95):
        self.decay = decay
        self.shadow_params = [p.clone().detach() for p in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for s, p in zip(self.shadow_params, parameters):
            s.sub_((1 - self.decay) * (s - p))

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for s, p in zip(self.shadow_params, parameters):
            p.copy_(s)

    @torch.no_grad()
    def restore(self, parameters):
        for s, p in zip(self.stored, parameters):
            p.copy_(s)


@torch.no_grad()
def validate(model, ema, generator):
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    model.eval()
    x, y = batch(generator, 32)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    ema.restore(model.parameters())
    model.train()
    return accuracy


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    held = torch.Generator().manual_seed(args.seed + 2)
    model = Net(args.width // 2)
    ema = EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, scores = [], []
    model.train()
    for step in range(args.steps):
        x, y = batch(generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step(model.parameters())
        losses.append(loss.item())
        if step % 4 == 3:
            scores.append(validate(model, ema, held))
    print("RESULT " + json.dumps({"losses": losses, "scores": scores}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
