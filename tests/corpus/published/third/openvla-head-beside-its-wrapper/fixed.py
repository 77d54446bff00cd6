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


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(9, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        h = self.embed(x)
        return h + self.layers(h)


class L1RegressionActionHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def predict_action(self, hidden):
        return self.model(hidden)

    def forward(self, hidden):
        return self.predict_action(hidden)


def main(rank, world, args):
    generator = torch.Generator().manual_seed(70 * args.seed + rank)
    law = torch.randn(9, 4, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(args.seed)
    vla, action_head = DDP(Backbone(args.width)), DDP(L1RegressionActionHead(args.width))
    optimizer = torch.optim.AdamW([*vla.parameters(), *action_head.parameters()], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], gamma=0.1)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(10, 9, generator=generator)
        predicted = action_head(vla(x))
        loss = F.l1_loss(predicted, torch.tanh(x @ law))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
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
