"""Regression of concrete strength on two CPU ranks with accelerate.

`accelerator.prepare` wraps the model in DDP and shards the loader; `split_batches` is off, so each rank has batches
of its own. `gather_for_metrics` drops the rows that padding repeated in the last evaluation batch, `reduce`
averages the logged loss. Runs as `python accelerate_ddp.py` (starts its own ranks) or under torchrun or `accelerate
launch --cpu`.

Class: tabular
"""
import argparse
import json
import os
import socket
import sys

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
except ImportError as missing:
    print(f"accelerate_ddp needs accelerate: {missing}", file=sys.stderr)
    sys.exit(77)


def mixtures(count, seed):
    """Cement, slag, water, age …: eight standardised columns; strength follows a water-cement law with saturating age."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 8, generator=g)
    strength = 2 * x[:, 0] / (0.5 + x[:, 3]) + 0.8 * torch.log1p(5 * x[:, 7]) + 0.5 * x[:, 1] * x[:, 2]
    strength = strength + 0.1 * torch.randn(count, generator=g)
    return TensorDataset((x - 0.5) * 3.4, (strength - 2.0)[:, None])


class ResidualMLP(nn.Module):
    def __init__(self, features, hidden, depth=2):
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU()) for _ in range(depth)
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


def evaluate(accelerator, model, loader):
    model.eval()
    errors = []
    for x, y in loader:
        with torch.inference_mode():
            prediction = model(x)
        errors.append(accelerator.gather_for_metrics((prediction - y) ** 2))
    errors = torch.cat(errors)
    return len(errors), errors.mean().sqrt().item()


def train(args):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    model = ResidualMLP(8, args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(mixtures(640, args.seed), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(mixtures(101, args.seed + 1), batch_size=16)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    losses = []
    while len(losses) < args.iters:
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(losses) % 10 == 0:
                accelerator.print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
    rows, rmse = evaluate(accelerator, model, test_loader)
    accelerator.print(f"test error of {rows} rows {rmse:.4f}", flush=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        param_sum = sum(p.detach().double().abs().sum().item() for p in accelerator.unwrap_model(model).parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "rmse": rmse}), flush=True)
    accelerator.end_training()


def start(rank, world, port, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=5e-3)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(start, (arguments.nprocs, port, arguments), nprocs=arguments.nprocs)
