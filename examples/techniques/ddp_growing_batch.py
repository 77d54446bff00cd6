"""DDP whose effective batch grows: no accumulation at first, then two and four micro-batches under `no_sync`.

Tricky: the number of backward calls before an update changes in mid-run, rank 0 alone writes checkpoints, every
rank evaluates its own shard with the inner module, bypassing the wrapper. Intrusion detection on two ranks; runs
alone or under torchrun.

Class: tabular
"""
import argparse
import contextlib
import io
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    """Gated units over connection statistics."""

    def __init__(self, features, hidden):
        super().__init__()
        self.gate, self.value = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.out(self.norm(torch.sigmoid(self.gate(x)) * self.value(x)))


def connections(count, rank, seed):
    g = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, 14, generator=g)
    attack = (x[:, 0] * x[:, 1] + x[:, 2] - x[:, 3].abs() + 0.5 > 0).long()
    return x, attack


class Worker:
    def __init__(self, rank, world, args):
        self.rank, self.world, self.args = rank, world, args
        self.x, self.y = connections(2048, rank, args.seed)
        torch.manual_seed(args.seed)                                    # the same initial weights on every rank
        self.model = DistributedDataParallel(Detector(14, args.hidden))
        torch.manual_seed(args.seed + 31 * rank + 1)                    # but batches of its own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2 * args.lr, total_steps=args.iters + 1)

    def micro_batches(self, it):
        return 1 if it < self.args.iters // 3 else 2 if it < 2 * self.args.iters // 3 else 4

    def update(self, it):
        self.model.train()
        self.optimizer.zero_grad()
        parts, total = self.micro_batches(it), 0.0
        for part in range(parts):
            rows = torch.randint(0, len(self.y), (self.args.batch_size,))
            with contextlib.nullcontext() if part == parts - 1 else self.model.no_sync():
                loss = F.cross_entropy(self.model(self.x[rows]), self.y[rows]) / parts
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return total

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        counts = torch.tensor([(self.model.module(self.x[:256]).argmax(1) == self.y[:256]).sum().item(), 256.0])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def checkpoint(self):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}, io.BytesIO())
        dist.barrier()

    def run(self):
        losses, accuracy = [], []
        for it in range(self.args.iters):
            mean = torch.tensor(self.update(it))
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            losses.append(mean.item() / self.world)
            if (it + 1) % 8 == 0:
                accuracy.append(self.evaluate())
                self.checkpoint()
                if self.rank == 0:
                    print(f"iter {it + 1} loss {losses[-1]:.4f} accuracy {accuracy[-1]:.3f}", flush=True)
        if self.rank == 0:
            param_sum = sum(p.detach().double().abs().sum().item() for p in self.model.parameters())
            print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    where = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **where)
    Worker(rank, world, args).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one micro-batch of one rank")
    parser.add_argument("--lr", type=float, default=1e-2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
