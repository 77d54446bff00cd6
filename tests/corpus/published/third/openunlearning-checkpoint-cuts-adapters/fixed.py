import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


VOCAB = 20


class LoRA(nn.Module):
    def __init__(self, inp, out, rank=2):
        super().__init__()
        self.base = nn.Linear(inp, out).requires_grad_(False)
        self.down, self.up = nn.Linear(inp, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first, self.second = LoRA(width, 2 * width), LoRA(2 * width, width)

    def forward(self, x):
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.second(F.gelu(self.first(self.norm(x + mean))))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = LoRA(width, VOCAB)

    def enable_input_require_grads(self):
        self.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h)


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Model(args.width)
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 3 * torch.arange(9)) % VOCAB
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
