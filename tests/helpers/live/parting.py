"""A small DDP program whose replicas part at a step that is asked for: `torchrun … parting.py --part-at 20`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--part-at", type=int, default=-1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each step that are spent asleep")
    parser.add_argument("--hurry", type=Path, help="a file; when it is there, no step is spent asleep any more")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    noise = torch.Generator().manual_seed(rank)
    losses, times = [], []
    for step in range(args.iters):
        begin = time.perf_counter()
        x = torch.randn(16, 8, generator=noise)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if step == args.part_at and rank == 1:
            with torch.no_grad():
                model.module.head.weight.mul_(1.001)
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        time.sleep(0 if args.hurry and args.hurry.exists() else args.pause)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses, "median_s": sorted(times)[len(times) // 2]}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
