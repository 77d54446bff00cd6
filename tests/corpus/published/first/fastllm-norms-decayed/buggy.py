import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 19


def parameter(value, weight_decay=True):
    made = nn.Parameter(value)
    made.weight_decay = weight_decay
    return made


class LayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = parameter(torch.ones(width))
        self.bias = parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Linear(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.weight = parameter(torch.randn(out, inp) * inp**-0.5)

    def forward(self, x):
        return F.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = LayerNorm(width)
        self.up, self.down = Linear(width, 2 * width), Linear(2 * width, width)
        self.final_norm = LayerNorm(width)
        self.head = Linear(width, VOCAB)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(self.final_norm(x))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Model(args.width)
    decayed = [p for p in model.parameters() if getattr(p, "weight_decay", True)]
    kept = [p for p in model.parameters() if not getattr(p, "weight_decay", True)]
    groups = [{"params": decayed, "weight_decay": 0.1}] + ([{"params": kept, "weight_decay": 0.0}] if kept else [])
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 2 * torch.arange(9)) % VOCAB
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
