"""Causal language model on data/rhymes.txt sharded with FSDP2 (`fully_shard`) over a device mesh (gloo, CPU).

Every block and the root are sharded; AdamW over DTensor parameters, global gradient-norm clipping, linear warmup, a full
state dict gathered at the end. Each rank reads its own windows of the text. Runs alone or under torchrun.

Class: language
"""
import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TEXT = Path(__file__).resolve().parent / "data" / "rhymes.txt"


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class Block(nn.Module):
    """Pre-norm attention and a gated feed-forward layer."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.layers = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.unembed = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


def train(rank, world, args):
    text = TEXT.read_text()
    chars = sorted(set(text))
    tokens = torch.tensor([chars.index(c) for c in text])

    torch.manual_seed(args.seed)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = LM(len(chars), args.width, args.heads, args.layers, args.context)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)

    g = torch.Generator().manual_seed(1000 * args.seed + rank)
    window = torch.arange(args.context + 1)
    losses = []
    for it in range(1, args.iters + 1):
        starts = torch.randint(0, len(tokens) - args.context - 1, (args.batch_size, 1), generator=g)
        batch = tokens[starts + window]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and it % 5 == 0:
            print(f"iter {it} loss {losses[-1]:.4f} norm {norm.item():.3f}", flush=True)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        param_sum = sum(t.double().abs().sum().item() for t in full.values())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


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
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--lr", type=float, default=6e-3)
    launch(parser.parse_args())
