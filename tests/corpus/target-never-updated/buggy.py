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

def soft_update(target, model, tau):
    with torch.no_grad():
        for a, b in zip(target.parameters(), model.parameters()):
            a.lerp_(b, tau)
def main(args):
    x, y = data(args.seed + 1)
    model = Net(12, args.width, 5); target = copy.deepcopy(model).eval()
    for p in target.parameters(): p.requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for it in range(args.iters):
        i = (it * 16) % 160
        out = model(x[i:i + 16])
        with torch.no_grad():
            goal = target(x[i:i + 16]).softmax(-1)
        loss = F.cross_entropy(out, y[i:i + 16]) + F.mse_loss(out.softmax(-1), goal)
        opt.zero_grad(); loss.backward(); opt.step()
        if it < 1: soft_update(target, model, 0.05)
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
