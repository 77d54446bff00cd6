import argparse
import copy
import json

import torch
from torch import nn


class Forecast(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, 6))
        self.register_buffer("variable_scaler", torch.ones(6))
        self.register_buffer("node_weights", torch.linspace(0.5, 1.5, 6))

    def update_scaler(self, value):
        self._buffers.pop("variable_scaler")
        self.register_buffer("variable_scaler", value)

    def forward(self, x):
        return x + self.net(x)

    def loss(self, x, y):
        return ((self(x) - y) ** 2 * self.variable_scaler.sqrt() * self.node_weights).mean()


@torch.no_grad()
def update_average(average, model, decay=0.9):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)
    for a, b in zip(average.buffers(), model.buffers()):
        a.copy_(b)


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(3))).Q
    model = Forecast(args.width)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    errors = torch.ones(6)
    losses, scores = [], []
    for step in range(args.steps):
        x = torch.randn(32, 6, generator=generator)
        y = x @ turn
        loss = model.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            errors = 0.8 * errors + 0.2 * (model(x) - y).pow(2).mean(0)
        model.update_scaler((1 / errors).clamp(max=10))
        update_average(average, model)
        losses.append(loss.item())
        if step % 5 == 4:
            with torch.no_grad():
                scores.append(average.loss(x, y).item())
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
