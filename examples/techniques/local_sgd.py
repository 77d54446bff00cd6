"""Local SGD: two ranks train alone and average their parameters every few steps.

Tricky: between two averagings the replicas differ, on purpose; gradients are never exchanged, and there is no DDP
wrapper. Each rank has data of its own from another machine (other noise). Momentum stays local. Runs alone or under
torchrun.

Class: signal
"""
import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager


class TemporalNet(nn.Module):
    """Dilated convolutions and attention pooling over sensor readings."""

    def __init__(self, channels, classes=3):
        super().__init__()
        wide = nn.Conv1d(channels, channels, 3, padding=2, dilation=2)
        self.convs = nn.ModuleList([nn.Conv1d(4, channels, 3, padding=1), wide])
        self.attend = nn.Conv1d(channels, 1, 1)
        self.out = nn.Linear(channels, classes)

    def forward(self, x):
        for conv in self.convs:
            x = F.gelu(conv(x))
        return self.out((x * self.attend(x).softmax(-1)).sum(-1))


def readings(count, machine, seed):
    """Four sensors over 40 samples: normal, a drift in one sensor, or a spike shared by all."""
    g = torch.Generator().manual_seed(97 * seed + machine)
    labels = torch.randint(0, 3, (count,), generator=g)
    time = torch.linspace(0, 1, 40)
    x = (0.3 + 0.1 * machine) * torch.randn(count, 4, 40, generator=g)
    x[:, 1] += 2 * time * (labels == 1)[:, None]
    centre = torch.rand(count, 1, generator=g)
    return x + 2 * (torch.exp(-((time - centre) / 0.05) ** 2) * (labels == 2)[:, None])[:, None], labels


class LocalTrainer:
    def __init__(self, rank, world, args):
        self.rank, self.world, self.args = rank, world, args
        torch.manual_seed(args.seed)                                    # equal initial weights
        self.model = TemporalNet(args.channels)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.8)
        self.averager = PeriodicModelAverager(period=args.period, warmup_steps=0)
        self.x, self.labels = readings(400, rank, args.seed)
        self.generator = torch.Generator().manual_seed(1000 * args.seed + rank)

    def step(self):
        rows = torch.randint(0, len(self.labels), (self.args.batch_size,), generator=self.generator)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.x[rows]), self.labels[rows])
        loss.backward()
        self.optimizer.step()
        self.averager.average_parameters(self.model.parameters())
        return loss.item()

    def spread(self):
        """Largest difference of a parameter from the mean over ranks."""
        flat = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        mean = flat.clone()
        dist.all_reduce(mean)
        worst = (flat - mean / self.world).abs().max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.item()

    def fit(self):
        losses = []
        self.model.train()
        for it in range(1, self.args.iters + 1):
            losses.append(self.step())
            if it % 10 == 0:
                spread = self.spread()
                if self.rank == 0:
                    print(f"iter {it} loss {losses[-1]:.4f} spread {spread:.5f}", flush=True)
        everyone = [None] * self.world
        dist.all_gather_object(everyone, losses)
        return [sum(values) / self.world for values in zip(*everyone)]


def start(rank, world, store, args):
    torch.set_num_threads(1)
    where = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **where)
    trainer = LocalTrainer(rank, world, args)
    losses = trainer.fit()
    if rank == 0:
        param_sum = sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=24, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--period", type=int, default=5, help="steps between two averagings")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
