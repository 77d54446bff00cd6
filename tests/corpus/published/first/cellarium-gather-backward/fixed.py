import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Gather(torch.autograd.Function):
    """All ranks' rows, one rank after the other; gradients come back to the rank that made the rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start : start + ctx.rows]


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def nt_xent(first, second, temperature=0.5):
    rank, batch = dist.get_rank(), len(first)
    everything = torch.cat([Gather.apply(first), Gather.apply(second)])
    own = torch.cat([first, second])
    scores = own @ everything.T / temperature
    here = torch.arange(batch) + rank * batch
    total = dist.get_world_size() * batch
    scores = scores.scatter(1, torch.cat([here, here + total]).view(-1, 1), float("-inf"))
    return F.cross_entropy(scores, torch.cat([here + total, here]))


def main(rank, world, args):
    generator = torch.Generator().manual_seed(10 * args.seed + rank)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Encoder(args.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(args.steps):
        cells = torch.randn(8, 12, generator=generator)
        views = [cells * (torch.rand(8, 12, generator=generator) > 0.2) for _ in range(2)]
        first, second = model(torch.cat(views)).chunk(2)
        loss = nt_xent(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
