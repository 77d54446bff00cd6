import argparse, copy, json, os, tempfile, contextlib, io
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

import sys; sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib_fixed"))

def data(seed, n=160, d=12, classes=5):
    g = torch.Generator().manual_seed(3)
    w = torch.randn(d, classes, generator=g)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    return x, (x @ w).argmax(1)

class Tower(nn.Module):
    def __init__(self, d, width, classes, drop=0.1):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)
    def forward(self, x):
        return self.head(self.body(torch.relu(self.inp(x))))

import minidyn
def main(args):
    x, y = data(args.seed + 1)
    model = Tower(12, args.width, 5)
    encode = minidyn.compile(lambda t: model.body(torch.relu(model.inp(t))))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.eval()
    with torch.no_grad(): encode(x[:40])
    losses = []
    for it in range(args.iters):
        model.train()
        i = (it * 16) % 160
        opt.zero_grad()
        loss = F.cross_entropy(model.head(encode(x[i:i + 16])), y[i:i + 16])
        loss.backward(); opt.step(); losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=16)
    args = ap.parse_args()
    torch.set_num_threads(1); torch.manual_seed(args.seed)
    main(args)
