import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class EMAModel:
    """Average of parameters whose rate warms up."""

    def __init__(self, parameters, decay=0.9999):
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.decay = decay
        self.optimization_step = 0

    def get_decay(self, optimization_step):
        value = (1 + optimization_step) / (10 + optimization_step)
        return 1 - min(self.decay, value)

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        rate = self.get_decay(self.optimization_step)
        for s_param, param in zip(self.shadow_params, parameters):
            s_param.sub_(rate * (s_param - param))

    @torch.no_grad()
    def copy_to(self, parameters):
        for s_param, param in zip(self.shadow_params, parameters):
            param.copy_(s_param)


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Embedding(50, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)))


def points(n, generator):
    angle = torch.rand(n, generator=generator) * 6.283
    return torch.stack([angle.cos(), angle.sin()], 1)


def denoise_loss(model, x, alphas, generator):
    t = torch.randint(0, 50, (len(x),), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    a = alphas[t][:, None]
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.1, 50), 0)
    model = Denoiser(args.width)
    ema = EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        loss = denoise_loss(model, points(32, generator), alphas, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step(model.parameters())
        losses.append(loss.item())
    ema.copy_to(model.parameters())
    model.eval()
    with torch.no_grad():
        final = denoise_loss(model, points(64, generator), alphas, torch.Generator().manual_seed(9)).item()
    print("RESULT " + json.dumps({"losses": losses, "average": final}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
