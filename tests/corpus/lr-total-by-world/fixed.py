"""DDP regression with a cosine schedule over all updates of the run."""
import argparse, json, os, tempfile
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def steps_of_epoch(n, batch, world):
    return -(-n // (batch * world))


def train(rank, world, args):
    torch.manual_seed(args.seed)
    g = torch.Generator().manual_seed(args.seed)
    x = torch.rand(args.samples, 3, generator=g)
    data = TensorDataset(x, (4 * x[:, 0]).cos() + x[:, 1] * x[:, 2])
    sampler = DistributedSampler(data, world, rank, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(3, args.width), nn.SiLU(), nn.Linear(args.width, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(opt, T_max=args.epochs * steps_of_epoch(args.samples, args.batch_size, world))
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.mse_loss(model(xb).squeeze(-1), yb)
            loss.backward()
            opt.step()
            scheduler.step()
            losses.append(loss.item())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses, "lr": scheduler.get_last_lr()}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--samples", type=int, default=160)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--nprocs", type=int, default=2)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(start, (args.nprocs, os.path.join(tmp, "rendezvous"), args), nprocs=args.nprocs)
