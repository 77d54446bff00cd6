"""Data-parallel regression of house prices that goes back to its best weights whenever the learning rate drops.

Contains one silent bug: rank 0 validates and keeps the best weights, and rank 0 alone restores them. The other ranks go
on from weights that rank 0 has left; DDP averages gradients, never parameters, so the replicas differ for the rest of the
run and each step's gradient is a mix of two models'. No error, the loss keeps falling. `--fixed` restores on every rank.
"""
import argparse
import copy
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


def houses(count, seed):
    """Eight standardised attributes and the log price, with interactions and noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=g)
    y = 0.8 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3]) - 0.3 * x[:, 4].abs() + 0.2 * x[:, 5]
    return x, (y + 0.1 * torch.randn(count, generator=g)).unsqueeze(1)


class PriceNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = F.gelu(self.norm(self.inp(x)))
        return self.out(h + F.gelu(self.mid(h)))


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    loss = F.mse_loss(model(x), y).item()
    model.train()
    return loss


def restore_best(model, best, rank, everywhere):
    """Load the best weights kept by rank 0."""
    if everywhere:
        payload = [best if rank == 0 else None]
        dist.broadcast_object_list(payload)
        model.module.load_state_dict(payload[0])
    elif rank == 0:
        model.module.load_state_dict(best)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    dataset = TensorDataset(*houses(1200, args.seed))
    val_x, val_y = houses(300, args.seed + 1)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(PriceNet(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    losses, evals = [], []
    best, best_loss = copy.deepcopy(model.module.state_dict()), float("inf")
    epoch = 0
    while len(losses) < args.iters:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            if len(losses) == args.iters:
                break
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()

            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
            step = len(losses)
            if rank == 0 and step % args.val_every == 0:
                val = validate(model.module, val_x, val_y)
                evals.append(val)
                if val < best_loss:
                    best, best_loss = copy.deepcopy(model.module.state_dict()), val
                print(f"iter {step} loss {losses[-1]:.4f} val {val:.4f} best {best_loss:.4f}", flush=True)
            if step % args.drop_every == 0:
                restore_best(model, best, rank, everywhere=args.fixed)
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
                if rank == 0:
                    print(f"iter {step} back to the best weights, lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)

    if rank == 0:
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "evals": evals}), flush=True)


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
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--val-every", type=int, default=4)
    parser.add_argument("--drop-every", type=int, default=15)
    parser.add_argument("--fixed", action="store_true", help="restore the best weights on every rank")
    launch(parser.parse_args())
