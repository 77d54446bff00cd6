"""Data parallelism by hand on two ranks: flattened gradients, one all_reduce a step, no DistributedDataParallel.

Tricky: nothing wraps the model. Weights and buffers are broadcast once from rank 0, gradients are averaged in one
flat buffer between backward and step, and the replicas stay equal because every rank takes the same step. Runs
alone or under torchrun.

Class: vision
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
from torch.nn.utils import parameters_to_vector


class GlyphNet(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.fc = nn.Linear(channels * 25, classes)

    def forward(self, x):
        return self.fc(self.norm(F.relu(self.conv2(F.relu(self.conv1(x))))).flatten(1))


def glyphs(count, seed, classes=6, size=10):
    """Six random 5x5 glyphs, shifted within a 10x10 image and noisy."""
    patterns = (torch.rand(classes, 5, 5, generator=torch.Generator().manual_seed(11)) > 0.5).float()
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=g)
    shifts = torch.randint(0, size - 5 + 1, (count, 2), generator=g).tolist()
    images = 0.2 * torch.randn(count, 1, size, size, generator=g)
    for i, (dy, dx) in enumerate(shifts):
        images[i, 0, dy:dy + 5, dx:dx + 5] += patterns[labels[i]]
    return images, labels


def broadcast_from_first(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model, world):
    flat = parameters_to_vector(p.grad for p in model.parameters())
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def train(rank, world, args):
    torch.manual_seed(args.seed + 1000 * rank)
    images, labels = (column[rank::world] for column in glyphs(800, args.seed))
    model = GlyphNet(args.channels, 6)
    broadcast_from_first(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        rows = torch.randint(0, len(labels), (args.batch_size,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        average_gradients(model, world)
        optimizer.step()
        mean = loss.detach().clone()
        dist.reduce(mean, dst=0)
        losses.append(mean.item() / world)
        if rank == 0 and it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)
    if rank == 0:
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
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=24, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
