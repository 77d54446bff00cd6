"""Logistic regression with early stopping: the best weights on held-out data are kept and put back."""
import argparse
import copy
import json

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    truth = torch.randn(args.features)
    x = torch.randn(300, args.features)
    y = ((x @ truth + torch.randn(300)) > 0).float()
    model = nn.Sequential(nn.BatchNorm1d(args.features), nn.Linear(args.features, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    best, kept, losses = float("inf"), None, []
    for i in range(args.iters):
        model.train()
        at = slice((i * 20) % 200, (i * 20) % 200 + 20)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[at])[:, 0], y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            held_out = nn.functional.binary_cross_entropy_with_logits(model(x[200:])[:, 0], y[200:]).item()
        if held_out < best:
            best, kept = held_out, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    print("RESULT " + json.dumps({"losses": losses, "best": best}))


main()
