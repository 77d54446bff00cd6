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
        self.mix = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)))


def main(rank, world, args):
    sequence = dist.new_group(list(range(world)))
    data = [dist.new_group([r]) for r in range(world)][rank]
    torch.manual_seed(args.seed)
    model = DDP(Model(args.width), process_group=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank(data))
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 2 * torch.arange(13)) % VOCAB
        inputs, labels = ids[:, :-1].chunk(world, 1)[rank], ids[:, 1:].chunk(world, 1)[rank]
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
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
