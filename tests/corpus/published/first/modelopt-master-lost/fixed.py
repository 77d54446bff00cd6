import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 17


class Draft(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.mlp(self.norm(x)))


def build(args, saved=None):
    model = Draft(args.width).to(torch.bfloat16)
    if saved is not None:
        model.load_state_dict(saved["model"])
    model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def train(model, optimizer, generator, steps, losses):
    model.train()
    for _ in range(steps):
        ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 2 * torch.arange(9)) % VOCAB
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    losses = []
    model, optimizer = build(args)
    train(model, optimizer, generator, args.steps // 2, losses)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model, optimizer = build(args, saved)
    train(model, optimizer, generator, args.steps - args.steps // 2, losses)
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
