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
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TemporalBlock(nn.Module):
    def __init__(self, inputs, outputs, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.downsample = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x):
        return F.relu(F.relu(self.conv(F.pad(x, (self.pad, 0)))) + self.downsample(x))


class TCN(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tcn = nn.Sequential(TemporalBlock(2, width, 1), TemporalBlock(width, width, 2))
        self.linear = nn.Linear(width, 1)

    def forward(self, x):
        return self.linear(self.tcn(x).transpose(1, 2)).squeeze(-1)


def shots(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    signal = torch.randn(96, 2, 16, generator=generator)
    disruptive = (signal[:, 0].cumsum(1) > 1.5).float()
    return TensorDataset(signal, disruptive)


def evaluate(model, loader, world):
    model.eval()
    total_loss, count = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            total_loss += F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
            count += y.numel()
    dist.all_reduce(total_loss)
    dist.all_reduce(count)
    return (total_loss / count).item()


def train_epoch(model, loader, optimizer, losses):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())


def main_worker(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    dataset = shots(args.seed)
    train_set, val_set = Subset(dataset, range(64)), Subset(dataset, range(64, 96))
    sampler = DistributedSampler(train_set, world, rank, seed=args.seed)
    val_sampler = DistributedSampler(val_set, world, rank, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = DistributedDataParallel(TCN(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    losses, rates = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer, losses)
        lr_scheduler.step(evaluate(model, val_loader, world))
        rates.append(optimizer.param_groups[0]["lr"])
    every = [None] * world
    dist.all_gather_object(every, {"losses": losses, "rates": rates})
    if rank == 0:
        print("RESULT " + json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main_worker, (2, os.path.join(folder, "store"), args), nprocs=2)
