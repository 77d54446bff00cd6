"""ZeRO stage 1: DDP with a ZeroRedundancyOptimizer trains a click-through model on two ranks.

Tricky: the moments of AdamW are sharded, each rank's inner optimizer updates only the parameters that it owns, and
the others arrive by broadcast at the end of the step; the state is consolidated on rank 0 before saving. Runs alone
or under torchrun.

Class: tabular
"""
import argparse
import io
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

FIELDS = (30, 12, 50, 8)


class FactorizationMachine(nn.Module):
    """First- and second-order effects of categorical fields, and a deep part (DeepFM)."""

    def __init__(self, hidden, dim=8):
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(size, 1) for size in FIELDS)
        self.factors = nn.ModuleList(nn.Embedding(size, dim) for size in FIELDS)
        self.deep = nn.Sequential(nn.Linear(len(FIELDS) * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        for table in self.factors:
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, fields):
        columns = fields.unbind(1)
        first = sum(table(c) for table, c in zip(self.linear, columns)).squeeze(1)
        vectors = torch.stack([table(c) for table, c in zip(self.factors, columns)], 1)
        second = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return first + second + self.deep(vectors.flatten(1)).squeeze(1)


def clicks(count, generator):
    """Impressions whose click rate depends on single fields and one pair."""
    fields = torch.stack([torch.randint(0, size, (count,), generator=generator) for size in FIELDS], 1)
    score = 1.5 * (fields[:, 0] % 5 == 0) - 1.5 * (fields[:, 2] % 3 == 0) - 0.5
    score = score + 2.0 * ((fields[:, 1] + fields[:, 3]) % 4 == 0)
    return fields, torch.bernoulli(score.sigmoid(), generator=generator)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(FactorizationMachine(args.hidden))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=args.iters)
    generator = torch.Generator().manual_seed(100 * args.seed + rank)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        fields, clicked = clicks(args.batch_size, generator)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(fields), clicked)
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        buffer = io.BytesIO()
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        print(f"checkpoint of {buffer.getbuffer().nbytes} bytes", flush=True)
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    where = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **where)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256, help="of each rank")
    parser.add_argument("--lr", type=float, default=2e-2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
