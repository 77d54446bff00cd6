import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x)) * self.scale


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.proj_in = nn.Linear(8, width)
        self.hidden = nn.Linear(width, width)
        self.proj_out = nn.Linear(width, 8)

    def forward(self, x, t):
        h = F.silu(self.proj_in(x) + self.time(t))
        return self.proj_out(F.silu(self.hidden(h)))


def inject(model):
    model.requires_grad_(False)
    for name in ("proj_in", "hidden", "proj_out"):
        setattr(model, name, LoRALinear(getattr(model, name)))
    return [p for p in model.parameters() if p.requires_grad]


def accumulation_step(index, length, grad_accum):
    last = (index // grad_accum + 1) * grad_accum
    size = grad_accum if last <= length else length - index // grad_accum * grad_accum
    return size, index + 1 == min(last, length)


def train_epoch(model, loader, optimizer, scheduler, grad_accum, generator, losses):
    model.train()
    for index, (latents,) in enumerate(loader):
        noise = torch.randn(latents.shape, generator=generator)
        t = torch.rand(len(latents), 1, generator=generator)
        predicted = model((1 - t) * latents + t * noise, t)
        loss = F.mse_loss(predicted, noise - latents)
        size, is_end = accumulation_step(index, len(loader), grad_accum)
        (loss / size).backward()
        if is_end:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())


def main(args):
    data = torch.randn(56, 8, generator=torch.Generator().manual_seed(args.seed + 1))
    data = data * 0.3 + torch.tensor([1.0, -1.0] * 4)
    loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
    model = Denoiser(args.width)
    parameters = inject(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    generator = torch.Generator().manual_seed(args.seed + 2)
    losses = []
    for _ in range(args.epochs):
        train_epoch(model, loader, optimizer, scheduler, args.grad_accum, generator, losses)
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--grad-accum", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
