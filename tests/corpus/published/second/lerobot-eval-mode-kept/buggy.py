import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU())
        self.dropout = nn.Dropout(0.1)
        self.actions = nn.Linear(width, 3)

    def forward(self, observation):
        return self.actions(self.dropout(self.encoder(observation)))


@torch.no_grad()
def eval_policy(policy, observations, actions):
    policy.eval()
    return (policy(observations) - actions).abs().mean().item()


def main(rank, world, args):
    generator = torch.Generator().manual_seed(100 * args.seed + rank)
    law = torch.randn(6, 3, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(args.seed)
    policy = DistributedDataParallel(Policy(args.width))
    torch.manual_seed(1000 * args.seed + rank)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    policy.train()
    losses = []
    for step in range(args.steps):
        observations = torch.randn(16, 6, generator=generator)
        loss = nn.functional.mse_loss(policy(observations), observations @ law)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 4 == 3:
            if rank == 0:
                held = torch.randn(32, 6, generator=generator)
                eval_policy(policy.module, held, held @ law)
            dist.barrier()
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
