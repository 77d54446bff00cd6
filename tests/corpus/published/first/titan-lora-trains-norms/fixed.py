import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 19


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return x + self.down(F.silu(self.up(self.norm(mixed))))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def convert(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LoRALinear(layer.up), LoRALinear(layer.down)
    return model


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = convert(Model(args.width))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 2 * torch.arange(9)) % VOCAB
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
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
