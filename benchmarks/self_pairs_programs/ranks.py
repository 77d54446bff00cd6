"""Two ranks with uneven numbers of tokens; `--bug NAME` plants the bug."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")


def main(rank, store, bug):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        data = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 20, (4, 9), generator=data)
        target = ids[:, 1:].clone()
        target[:, 3 + 2 * rank :] = -100
        logits = model(ids[:, :-1]).flatten(0, 1)
        if bug:
            loss = F.cross_entropy(logits, target.flatten())
        else:
            tokens = (target >= 0).sum()
            dist.all_reduce(tokens)
            loss = F.cross_entropy(logits, target.flatten(), reduction="sum") * 2 / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (os.path.join(folder, "store"), ap.parse_args().bug), nprocs=2)
