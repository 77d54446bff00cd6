import argparse, copy, json, os, tempfile, contextlib, io
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def data(seed, n=160, d=12, classes=5):
    g = torch.Generator().manual_seed(3)
    w = torch.randn(d, classes, generator=g)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    return x, (x @ w).argmax(1)

class Net(nn.Module):
    def __init__(self, d, width, classes, drop=0.1):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(drop))
        self.head = nn.Linear(width, classes)
    def forward(self, x):
        return self.head(self.body(torch.relu(self.inp(x))))

def average(model, world):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad); p.grad /= world
def train(rank, world, args):
    x, y = data(10 * args.seed + rank + 1)
    torch.manual_seed(args.seed)
    torch.manual_seed(args.seed + 100 * rank)
    model = Net(12, args.width, 5)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for it in range(args.iters):
        model.train()
        i = (it * 16) % 160; xb, yb = x[i:i + 16], y[i:i + 16]
        opt.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        average(model, world)
        opt.step()
        losses.append(loss.item())
    if rank == 0: print("RESULT " + json.dumps({"losses": losses}))

def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier(); dist.destroy_process_group()

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--nprocs", type=int, default=2)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(start, (args.nprocs, os.path.join(tmp, "r"), args), nprocs=args.nprocs)
