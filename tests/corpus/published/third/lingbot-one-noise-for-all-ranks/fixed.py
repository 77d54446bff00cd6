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


def set_seed(seed):
    torch.manual_seed(seed)


class Velocity(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(4 + 6 + 1, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 4)

    def forward(self, actions, state, time):
        return self.out(self.mid(self.inp(torch.cat([actions, state, time], 1))))


def main(rank, world, args):
    law = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    state = torch.randn(96, 6, generator=torch.Generator().manual_seed(args.seed + 1))
    data = torch.utils.data.TensorDataset(state, torch.tanh(state @ law))
    sampler = torch.utils.data.DistributedSampler(data, world, rank, seed=args.seed)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    set_seed(args.seed)
    model = DDP(Velocity(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    set_seed(args.seed + rank)
    losses = []
    for epoch in range(args.steps // 6 + 1):
        sampler.set_epoch(epoch)
        for state, actions in loader:
            noise, time = torch.randn(actions.shape), torch.rand(len(actions), 1)
            between = time * noise + (1 - time) * actions
            loss = F.mse_loss(model(between, state, time), noise - actions)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    every = [None] * world
    dist.all_gather_object(every, losses)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": every}))


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
