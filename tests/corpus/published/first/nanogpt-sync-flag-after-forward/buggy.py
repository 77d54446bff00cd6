import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


VOCAB, ACCUMULATE = 21, 3


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx)
        logits = self.lm_head(self.ln_f(x + self.body(x)))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def main(rank, world, args):
    generator = torch.Generator().manual_seed(50 * args.seed + rank)
    torch.manual_seed(args.seed)
    model = DDP(GPT(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_accum = 0.0
        for micro_step in range(ACCUMULATE):
            ids = (torch.randint(0, VOCAB, (4, 1), generator=generator) + 2 * torch.arange(9)) % VOCAB
            logits, loss = model(ids[:, :-1], ids[:, 1:].contiguous())
            loss = loss / ACCUMULATE
            loss_accum += loss.detach()
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss.backward()
        dist.all_reduce(loss_accum, op=dist.ReduceOp.AVG) if dist.get_backend() == "nccl" else dist.all_reduce(loss_accum)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss_accum.item())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses}))


def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    main(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (args.nprocs, os.path.join(folder, "store"), args), nprocs=args.nprocs)
