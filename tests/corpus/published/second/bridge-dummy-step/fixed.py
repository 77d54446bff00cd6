import argparse
import copy
import json

import torch
import torch.nn.functional as F
from torch import nn


def build(width):
    model = nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))


def materialize(optimizer):
    """Make the optimizer's state exist, so that a checkpoint can be loaded into it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def load(checkpoint, model, optimizer):
    model.load_state_dict(checkpoint["model"])
    if "optimizer" in checkpoint:
        materialize(optimizer)
        optimizer.load_state_dict(checkpoint["optimizer"])


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    law = torch.randn(10, 4, generator=torch.Generator().manual_seed(9))
    pretrained, _ = build(args.width)
    checkpoint = {"model": copy.deepcopy(pretrained.state_dict())}
    model, optimizer = build(args.width)
    load(checkpoint, model, optimizer)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(16, 10, generator=generator)
        loss = F.cross_entropy(model(x), (x @ law).argmax(1))
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
