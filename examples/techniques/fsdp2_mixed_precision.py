"""FSDP2 with mixed precision: bf16 in forward and backward, float32 shards and reductions, two ranks.

Tricky: the dtype that modules see differs from that of the parameters that the optimizer owns; root and blocks have
policies of their own, the output stays float32. A language model of sums such as 3+9=12 is trained on the results
only. Runs alone or under torchrun.

Class: language
"""
import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SYMBOLS = "0123456789+="


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True, bias=False)
        self.gate, self.up, self.down = (nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Adder(nn.Module):
    def __init__(self, dim, length, depth=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(SYMBOLS), dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, len(SYMBOLS))

    def forward(self, ids):
        h = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def sums(count, generator):
    """Rows like `3+9=12`; symbols before the result are not predicted."""
    a, b = torch.randint(0, 10, (2, count), generator=generator).tolist()
    rows = torch.tensor([[SYMBOLS.index(c) for c in f"{x}+{y}={x + y:02d}"] for x, y in zip(a, b)])
    return rows[:, :-1], rows[:, -2:]


def shard(model, mesh):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=half)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=outer)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    model = shard(Adder(args.dim, 6), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    generator = torch.Generator().manual_seed(7 * args.seed + rank)

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        inputs, results = sums(args.batch_size, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs)[:, 3:].flatten(0, 1), results.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f} parameters {next(model.parameters()).dtype}", flush=True)

    param_sum = sum(p.full_tensor().detach().double().abs().sum().item() for p in model.parameters())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    where = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **where)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=48, help="of each rank")
    parser.add_argument("--lr", type=float, default=1e-2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, arguments)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(start, (arguments.nprocs, os.path.join(tmp, "store"), arguments), nprocs=arguments.nprocs)
