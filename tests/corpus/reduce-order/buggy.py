import argparse, json, os, random, tempfile
import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.read = nn.Linear(width, 1)
    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.read(x)

def mean_gradients(model, world, order):
    grads = dict(model.named_parameters())
    for name in order(sorted(grads)):
        dist.all_reduce(grads[name].grad, op=dist.ReduceOp.SUM)
        grads[name].grad.mul_(1 / world)

def work(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    model = Tower(args.width, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    shuffle = random.Random(rank)
    def order(names):
        weights = [n for n in names if n.startswith("blocks")]
        shuffle.shuffle(weights)  # BUG: each rank has an order of its own, as that of a set is
        return weights + [n for n in names if not n.startswith("blocks")]
    g = torch.Generator().manual_seed(50 + rank)
    losses = []
    for _ in range(args.iters):
        x = torch.randn(16, args.width, generator=g)
        y = x[:, :1] * x[:, 1:2]
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        mean_gradients(model, world, order)
        optimizer.step()
        losses.append(loss.item())
    if rank == 0: print("RESULT " + json.dumps({"losses": losses}))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=10)
    ap.add_argument("--nprocs", type=int, default=2)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(work, (args.nprocs, os.path.join(tmp, "r"), args), nprocs=args.nprocs)
