import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


class VisionLanguage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(12, width), nn.GELU())
        self.mm_projector = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.language = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 7))

    def forward(self, image):
        return self.language(self.mm_projector(self.vision(image)))


def prepare(model, tunable_parts):
    model.requires_grad_(False)
    for i in (0, 2):
        model.language[i] = LoRALinear(model.language[i])
    model.requires_grad_(False)
    for part in tunable_parts:
        getattr(model, part).requires_grad_(True)
    return model


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(12, 7, generator=torch.Generator().manual_seed(6))
    model = prepare(VisionLanguage(args.width), ["mm_projector"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(args.steps):
        image = torch.randn(16, 12, generator=generator)
        loss = F.cross_entropy(model(image), (image @ law).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
