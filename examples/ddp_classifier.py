"""Data-parallel classification of tabular clusters with DistributedDataParallel (gloo).

DistributedSampler with set_epoch, BatchNorm buffers broadcast by DDP, SGD with Nesterov momentum, CosineAnnealingLR per
epoch, sharded evaluation combined with all_reduce, checkpoint written by rank 0 only and loaded by every rank.
Runs as `python ddp_classifier.py` (starts its own ranks) or under torchrun.

Class: tabular
"""
import argparse
import json
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Spirals(Dataset):
    """Points on interleaved spiral arms, lifted into `dims` dimensions by a fixed random map."""

    def __init__(self, count, arms, dims, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.arange(count) % arms
        r = torch.rand(count, generator=g) * 1.5 + 0.2
        theta = 2 * r + 6.2832 * self.y / arms + 0.1 * torch.randn(count, generator=g)
        flat = torch.stack([r * theta.cos(), r * theta.sin()], dim=1)
        self.x = torch.cat([flat, torch.sin(flat @ torch.randn(2, dims - 2, generator=torch.Generator().manual_seed(99)))], 1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build_model(dims, width, classes):
    return nn.Sequential(
        nn.Linear(dims, width), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.05),
        nn.Linear(width, classes),
    )


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts[0] += (model(x).argmax(1) == y).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def save_and_reload(model, rank):
    """Rank 0 writes the checkpoint, every rank reads it back."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "checkpoint.pt")
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
    model.module.load_state_dict(torch.load(path, weights_only=True))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def train(rank, world, args):
    torch.manual_seed(args.seed + rank)          # dropout differs per rank; DDP broadcasts rank 0's weights
    train_set = Spirals(1024, 4, 10, args.seed)
    test_set = Spirals(256, 4, 10, args.seed + 1)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(
        test_set, batch_size=64, sampler=DistributedSampler(test_set, num_replicas=world, rank=rank, shuffle=False)
    )
    model = DDP(build_model(10, args.width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    epochs = -(-args.iters // len(loader))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    losses, accuracy = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            if len(losses) == args.iters:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
            if rank == 0 and len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
        scheduler.step()
        accuracy.append(evaluate(model, test_loader))
        if rank == 0:
            print(f"epoch {epoch + 1} test accuracy {accuracy[-1]:.3f}", flush=True)

    save_and_reload(model, rank)
    if rank == 0:
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


def launch(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:        # torchrun
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, args)
        return
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(start, (args.nprocs, os.path.join(tmp, "rendezvous"), args), nprocs=args.nprocs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    launch(parser.parse_args())
