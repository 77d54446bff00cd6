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

def main(args):
    x, y = data(args.seed + 1)
    xv, yv = data(args.seed + 2, 40)
    model = Net(12, args.width, 5)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    scaler = torch.amp.GradScaler('cpu', init_scale=256.)
    losses = []
    for it in range(args.iters):
        model.train()
        i = (it * 16) % 160
        opt.zero_grad()
        with torch.autocast('cpu', dtype=torch.bfloat16):
            out = model(x[i:i + 16])
        loss = F.cross_entropy(out.float(), y[i:i + 16])
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if it % 4 == 3:
            model.eval()
            with torch.no_grad():
                acc = (model(xv).argmax(1) == yv).float().mean()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=16)
    args = ap.parse_args()
    torch.set_num_threads(1); torch.manual_seed(args.seed)
    main(args)
