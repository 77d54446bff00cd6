import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ConstantLR, ExponentialLR, LinearLR, SequentialLR


def data(seed):
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(seed + 1))
    return torch.utils.data.TensorDataset(x, x[:, :3].tanh().sum(1, keepdim=True))


def build(args):
    model = nn.Sequential(nn.Linear(9, args.width), nn.Tanh(), nn.Linear(args.width, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def epoch(model, optimizer, loader, losses):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def schedule(optimizer):
    warm, cool = LinearLR(optimizer, 0.1, 1.0, total_iters=3), CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-3)
    return SequentialLR(optimizer, [warm, cool], milestones=[3])


def main(args):
    loader = torch.utils.data.DataLoader(data(args.seed), batch_size=16, shuffle=True)
    losses = []
    model, optimizer = build(args)
    scheduler = schedule(optimizer)
    for _ in range(5):
        epoch(model, optimizer, loader, losses)
        scheduler.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    model, optimizer = build(args)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler = schedule(optimizer)
    scheduler.load_state_dict(saved["scheduler"])
    for _ in range(5, 9):
        epoch(model, optimizer, loader, losses)
        scheduler.step()
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
