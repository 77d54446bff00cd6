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


class EMA:
    def __init__(self, model, beta=0.9):
        self.beta = beta
        self.online_model = model
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.parameter_names = {name for name, _ in model.named_parameters()}
        self.buffer_names = {name for name, _ in model.named_buffers()}

    @torch.no_grad()
    def update(self):
        online, average = dict(self.online_model.named_parameters()), dict(self.ema_model.named_parameters())
        for name in self.parameter_names:
            average[name].lerp_(online[name], 1 - self.beta)
        online, average = dict(self.online_model.named_parameters()), dict(self.ema_model.named_parameters())
        for name in self.buffer_names:
            if name in average:
                average[name].copy_(online[name])


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Net(args.width // 2)
    ema = EMA(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses, scores = [], []
    for step in range(args.steps):
        model.train()
        x, y = batch(generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        losses.append(loss.item())
        if step % 5 == 4:
            x, y = batch(generator, 32)
            with torch.no_grad():
                scores.append(F.cross_entropy(ema.ema_model(x), y).item())
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
