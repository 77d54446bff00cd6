import argparse
import json
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class GalaxyStream(IterableDataset):
    """Galaxies as rows of patches, in the order in which they come."""

    def __init__(self, seed, part=0, parts=1):
        self.seed = seed
        self.part, self.parts = part, parts

    def split_by_rank(self, rank, world):
        return GalaxyStream(self.seed, rank, world)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + 1)
        number = 0
        while True:
            centre, slope = torch.randn(1, 4, generator=generator), torch.randn(1, 4, generator=generator)
            patches = centre + slope * torch.linspace(-1, 1, 7).unsqueeze(1) + 0.05 * torch.randn(7, 4, generator=generator)
            if number % self.parts == self.part:
                yield {"X": patches[:-1], "Y": patches[1:]}
            number += 1


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Linear(4, width)
        self.wpe = nn.Parameter(torch.randn(6, width) * 0.02)
        self.h = nn.Sequential(Block(width), Block(width))
        self.decoder = nn.Linear(width, 4)

    def forward(self, idx, targets):
        out = self.decoder(self.h(self.encoder(idx) + self.wpe))
        return out, F.huber_loss(out, targets)


def get_lr(it, warmup=4, total=24, top=4e-3, low=4e-4):
    if it < warmup:
        return top * (it + 1) / warmup
    return low + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (total - warmup))) * (top - low)


def main(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(1337 + args.seed + rank)
    stream = GalaxyStream(args.seed)
    loader = iter(DataLoader(stream, batch_size=8))
    model = DDP(GPT(args.width))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=4e-3, betas=(0.9, 0.95))
    losses = []
    for it in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        batch = next(loader)
        _, loss = model(batch["X"], batch["Y"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (2, os.path.join(folder, "store"), args), nprocs=2)
