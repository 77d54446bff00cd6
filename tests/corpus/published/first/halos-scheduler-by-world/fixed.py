import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AcceleratedScheduler:
    """Steps a scheduler, by default once for each process, as its plan is in batches of one process."""

    def __init__(self, scheduler, step_with_optimizer=True, split_batches=False):
        self.scheduler, self.split_batches = scheduler, split_batches

    def step(self):
        for _ in range(1 if self.split_batches else dist.get_world_size()):
            self.scheduler.step()


class Reward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(self.body(x)).squeeze(-1)


def main(rank, world, args):
    generator = torch.Generator().manual_seed(30 * args.seed + rank)
    taste = torch.randn(10, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(args.seed)
    model = DDP(Reward(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * max(0.0, 1 - step / args.steps))
    scheduler = AcceleratedScheduler(plan, split_batches=True)
    losses = []
    for _ in range(args.steps):
        first, second = torch.randn(2, 12, 10, generator=generator)
        better = ((first - second) @ taste > 0).float()
        scores = model(torch.cat([first, second]))
        loss = F.binary_cross_entropy_with_logits(scores[:12] - scores[12:], better)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses}))


def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    main(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (args.nprocs, os.path.join(folder, "store"), args), nprocs=args.nprocs)
