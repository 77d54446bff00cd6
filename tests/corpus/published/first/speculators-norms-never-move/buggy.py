import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 23


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.input_layernorm(x))


class Draft(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    draft = Draft(args.width).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, VOCAB, (16, 1), generator=generator) * 3 + torch.arange(9)) % VOCAB
        logits = draft(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
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
