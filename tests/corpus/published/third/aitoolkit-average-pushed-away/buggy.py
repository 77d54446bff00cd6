import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class ExponentialMovingAverage:
    def __init__(self, parameters, decay=0.9):
        self.decay = decay
        self.params = list(parameters)
        self.shadow_params = [p.clone().detach() for p in self.params]

    @torch.no_grad()
    def update(self):
        one_minus_decay = 1.0 - self.decay
        for shadow, param in zip(self.shadow_params, self.params):
            gap = shadow.float() - param.float()
            shadow.add_(gap * one_minus_decay)

    @torch.no_grad()
    def copy_to(self):
        for shadow, param in zip(self.shadow_params, self.params):
            param.copy_(shadow)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = LoRALinear(nn.Linear(10, width))
        self.second = LoRALinear(nn.Linear(width, width))
        self.last = LoRALinear(nn.Linear(width, 4))

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))
    model = Net(args.width)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    ema = ExponentialMovingAverage(trained)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(24, 10, generator=generator)
        loss = F.mse_loss(model(x), torch.tanh(x @ law))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        losses.append(loss.item())
    ema.copy_to()
    with torch.no_grad():
        x = torch.randn(64, 10, generator=torch.Generator().manual_seed(9))
        final = F.mse_loss(model(x), torch.tanh(x @ law)).item()
    print("RESULT " + json.dumps({"losses": losses, "average": final}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
