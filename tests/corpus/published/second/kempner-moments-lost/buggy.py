import argparse
import json
import tempfile

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn


def build(args):
    model = nn.Sequential(nn.Linear(10, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def save(folder, model, optimizer):
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load(folder, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def train(model, optimizer, generator, steps, losses):
    law = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))
    model.train()
    for _ in range(steps):
        x = torch.randn(16, 10, generator=generator)
        loss = F.cross_entropy(model(x), (x @ law).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    losses = []
    model, optimizer = build(args)
    with tempfile.TemporaryDirectory() as folder:
        train(model, optimizer, generator, args.steps // 2, losses)
        save(folder, model, optimizer)
        model, optimizer = build(args)
        load(folder, model, optimizer)
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
