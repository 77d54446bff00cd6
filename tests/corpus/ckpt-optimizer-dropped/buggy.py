"""Character model trained in two legs; the second resumes from the checkpoint of the first."""
import argparse
import io
import json

import torch
from torch import nn


class Chars(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(30, width)
        self.conv = nn.Conv1d(width, width, 3)
        self.out = nn.Linear(width, 30)

    def forward(self, ids):
        return self.out(torch.relu(self.conv(self.table(ids).transpose(1, 2))).amax(2))


def leg(args, steps, saved):
    torch.manual_seed(args.seed + steps[0])
    model = Chars(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if saved is not None:
        saved.seek(0)
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["weights"])
    losses = []
    for step in steps:
        ids = (torch.arange(12) * (step % 5 + 1) + torch.randint(0, 30, (16, 1))) % 30
        loss = nn.functional.cross_entropy(model(ids[:, :-1]), ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    target = io.BytesIO()
    torch.save({"weights": model.state_dict(), "moments": optimizer.state_dict()}, target)
    return losses, target


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    half = args.iters // 2
    first, saved = leg(args, range(half), None)
    second, _ = leg(args, range(half, args.iters), saved)
    print("RESULT " + json.dumps({"losses": first + second}))


main()
