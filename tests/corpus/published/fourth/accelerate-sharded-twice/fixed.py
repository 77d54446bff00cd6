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
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset


class RankSampler(Sampler):
    """Rows of this rank, in an order of this epoch."""

    def __init__(self, size, rank, world, seed):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return self.size // self.world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        return iter(order[self.rank :: self.world])


class BatchSamplerShard(BatchSampler):
    def __init__(self, batch_sampler, num_processes, process_index):
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index

    def __len__(self):
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self):
        for index, batch in enumerate(self.batch_sampler):
            if index % self.num_processes == self.process_index:
                yield batch


class Accelerator:
    def __init__(self, already_sharded=False):
        self.already_sharded = already_sharded
        self.num_processes, self.process_index = dist.get_world_size(), dist.get_rank()

    def prepare_data_loader(self, loader):
        if self.already_sharded:
            return loader
        shard = BatchSamplerShard(loader.batch_sampler, self.num_processes, self.process_index)
        return DataLoader(loader.dataset, batch_sampler=shard)

    def prepare(self, model, optimizer, loader):
        return DistributedDataParallel(model), optimizer, self.prepare_data_loader(loader)

    def backward(self, loss):
        loss.backward()

    def gather(self, value):
        parts = [torch.zeros_like(value) for _ in range(self.num_processes)]
        dist.all_gather(parts, value)
        return torch.stack(parts)


def get_model(width):
    return nn.Sequential(nn.Linear(9, width), nn.SELU(), nn.AlphaDropout(0.05), nn.Linear(width, width), nn.SELU(), nn.Linear(width, 2))


def training_function(args):
    accelerator = Accelerator(already_sharded=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(args.seed)
    x = torch.randn(96, 9, generator=torch.Generator().manual_seed(args.seed + 1))
    y = torch.stack([x[:, :4].sum(1), x[:, 4:].prod(1)], 1)
    sampler = RankSampler(len(x), rank, world, args.seed)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
    model = get_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=args.steps + 1)
    torch.manual_seed(args.seed + rank)
    history, done, epoch = [], 0, 0
    while done < args.steps:
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            if done == args.steps:
                break
            loss = F.smooth_l1_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            history.append(accelerator.gather(loss.detach()).mean().item())
            done += 1
        epoch += 1
    if rank == 0:
        print("RESULT " + json.dumps({"losses": history, "epochs": epoch}))


def launch(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    training_function(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(launch, (2, os.path.join(folder, "store"), args), nprocs=2)
