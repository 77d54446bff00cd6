import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


def zeropower_via_newtonschulz(grad, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    ortho = grad.to(dtype=torch.bfloat16)
    if grad.shape[0] > grad.shape[1]:
        ortho = ortho.T
    ortho.div_(ortho.norm().clamp(min=1e-7))
    for _ in range(steps):
        gram = ortho @ ortho.T
        ortho = a * ortho + (b * gram + c * gram @ gram) @ ortho
    return ortho.T if grad.shape[0] > grad.shape[1] else ortho


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = zeropower_via_newtonschulz(buffer)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + self.down(F.relu(self.up(h)).square()))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Net(args.width).to(torch.bfloat16)
    muon = Muon([model.up.weight, model.down.weight])
    adam = torch.optim.AdamW([model.embed.weight, model.head.weight], lr=3e-3)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, 16, (8, 1), generator=generator) + 3 * torch.arange(9)) % 16
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
