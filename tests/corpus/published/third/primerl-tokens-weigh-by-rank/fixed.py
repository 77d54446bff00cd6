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


VOCAB = 21


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids))[0])


def microbatch(generator):
    ids = (torch.randint(0, VOCAB, (6, 1), generator=generator) + 2 * torch.arange(13)) % VOCAB
    lengths = torch.randint(2, 13, (6, 1), generator=generator)
    return ids[:, :-1], ids[:, 1:], torch.arange(12)[None] < lengths


def main(rank, world, args):
    generator = torch.Generator().manual_seed(100 * args.seed + rank)
    torch.manual_seed(args.seed)
    model = DDP(Model(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(args.steps):
        ids, labels, mask = microbatch(generator)
        loss_scale = mask.sum()
        dist.all_reduce(loss_scale)
        each = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="none")
        loss = (each * mask.flatten()).sum() * world / loss_scale
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(((each.detach() * mask.flatten()).sum() / mask.sum()).item())
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
