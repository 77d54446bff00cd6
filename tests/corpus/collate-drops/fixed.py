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

class Pipe(torch.utils.data.Dataset):
    def __init__(self, seed): self.x, self.y = data(seed)
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]
def collate(rows):
    return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
def main(args):
    ds = Pipe(args.seed + 1)
    loader = torch.utils.data.DataLoader(ds, 16, shuffle=True, collate_fn=collate)
    model = Net(12, args.width, 5); opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = 0; losses = []
    while it < args.iters:
        for x, y in loader:
            model.train(); opt.zero_grad()
            loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            losses.append(loss.item()); it += 1
            if it >= args.iters: break
    print("RESULT " + json.dumps({"losses": losses}))

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=16)
    args = ap.parse_args()
    torch.set_num_threads(1); torch.manual_seed(args.seed)
    main(args)
