"""DDP training for a number of epochs with a sharded sampler; the loop runs for a computed number of updates."""
import argparse, json, os, tempfile
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    a = 6.28 * torch.rand(n, generator=g)
    r = 1.0 + y + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    data = rings(args.samples, args.seed)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    total = args.epochs * len(loader)
    model = DDP(nn.Sequential(nn.Linear(2, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done, epoch, losses = 0, 0, []
    while done < total:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            done += 1
            if done == total:
                break
        epoch += 1
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--samples", type=int, default=192)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--nprocs", type=int, default=2)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(start, (args.nprocs, os.path.join(tmp, "rendezvous"), args), nprocs=args.nprocs)
