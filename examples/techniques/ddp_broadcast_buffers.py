"""DDP with BatchNorm whose running statistics are broadcast from rank 0 before every forward, on two ranks.

Tricky: the ranks' batches differ, so each rank's statistics drift within a step and are overwritten by rank 0's at
the next forward (`broadcast_buffers`); gradients are views into buckets; a branch is skipped at random, hence
`find_unused_parameters`. The validation loss is what rank 0 would deploy. Runs alone or under torchrun.

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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class StochasticBlock(nn.Module):
    """A residual branch that is left out in some training steps (stochastic depth)."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x, keep):
        return x + F.relu(self.bn(self.conv(x))) if keep else x


class TileNet(nn.Module):
    def __init__(self, channels, depth=2, classes=5):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.blocks = nn.ModuleList(StochasticBlock(channels) for _ in range(depth))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x, keep):
        h = self.stem(x)
        for block, kept in zip(self.blocks, keep):
            h = block(h, kept)
        return self.fc(h.mean((2, 3)))


def tiles(count, seed):
    """Satellite-like tiles: five land covers with a mean colour and a roughness each."""
    g = torch.Generator().manual_seed(seed)
    colours = torch.rand(5, 3, 1, 1, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(0, 5, (count,), generator=g)
    rough = (0.1 + 0.15 * labels)[:, None, None, None]
    light = 0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=g)
    return TensorDataset(colours[labels] * light + rough * torch.randn(count, 3, 12, 12, generator=g), labels)


def validate(model, loader):
    """Loss on the whole set, the same on every rank: the wrapper hands rank 0's statistics out in eval mode, too."""
    model.eval()
    with torch.no_grad():
        parts = [F.cross_entropy(model(x, (True, True)), y, reduction="sum") for x, y in loader]
    model.train()
    return torch.stack(parts).sum().item() / len(loader.dataset)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    model = DDP(TileNet(args.channels), broadcast_buffers=True, find_unused_parameters=True, gradient_as_bucket_view=True)
    data = tiles(480, args.seed)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(tiles(96, args.seed + 1), batch_size=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    coin = torch.Generator().manual_seed(args.seed)                     # the same coin on all ranks

    losses, validation, epoch = [], [], 0
    while len(losses) < args.iters:
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            keep = tuple((torch.rand(2, generator=coin) < 0.8).tolist())
            loss = F.cross_entropy(model(images, keep), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            both = loss.detach().clone()
            dist.all_reduce(both)
            losses.append(both.item() / world)
            if len(losses) == args.iters:
                break
        epoch += 1
        validation.append(validate(model, val_loader))
        if rank == 0:
            print(f"epoch {epoch} loss {losses[-1]:.4f} validation {validation[-1]:.4f}", flush=True)
    if rank == 0:
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "validation": validation}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    where = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **where)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=20, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
