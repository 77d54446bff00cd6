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


class LearnableCodebook(nn.Module):
    def __init__(self, dim, codebook_size):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(codebook_size, dim) * 0.5)
        self.use_ddp = dist.is_initialized() and dist.get_world_size() > 1

    def forward(self, x):
        index = torch.cdist(x, self.embed).argmin(-1)
        return F.embedding(index, self.embed), index


class VectorQuantize(nn.Module):
    """Moves its codes by an optimizer of its own, in the forward."""

    def __init__(self, dim, codebook_size, commitment_weight=0.25, in_place_codebook_optimizer=None):
        super().__init__()
        self._codebook = LearnableCodebook(dim, codebook_size)
        self.commitment_weight = commitment_weight
        self.in_place_codebook_optimizer = in_place_codebook_optimizer(self._codebook.parameters())

    def _move_codes(self, x):
        with torch.enable_grad():
            quantize, _ = self._codebook(x)
            F.mse_loss(quantize, x).backward()
        if self._codebook.use_ddp:
            for p in self._codebook.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.in_place_codebook_optimizer.step()
        self.in_place_codebook_optimizer.zero_grad()

    def forward(self, x):
        if self.training:
            self._move_codes(x.detach())
        with torch.no_grad():
            quantize, index = self._codebook(x.detach())
        commit = F.mse_loss(x, quantize) * self.commitment_weight
        return x + (quantize - x).detach(), index, commit


class AutoEncoder(nn.Module):
    def __init__(self, width, dim=4):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.Linear(width, dim))
        self.quantize = VectorQuantize(dim, 12, in_place_codebook_optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.5))
        self.decode = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, x):
        z, index, commit = self.quantize(self.encode(x))
        return self.decode(z), index, commit


def train(rank, world, args):
    torch.manual_seed(args.seed)
    model = AutoEncoder(args.width)
    codes = {id(p) for p in model.quantize._codebook.parameters()}
    ignored = [name for name, p in model.named_parameters() if id(p) in codes]
    DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    model = DDP(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in codes], lr=4e-3)
    mixing = torch.randn(3, 10, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(args.seed * 100 + rank)
    losses, used = [], []
    model.train()
    for _ in range(args.steps):
        x = torch.tanh(torch.randn(24, 3, generator=generator) @ mixing)
        decoded, index, commit = model(x)
        loss = F.l1_loss(decoded, x) + commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        used.append(len(index.unique()))
    every = [None] * world
    dist.all_gather_object(every, {"losses": losses, "used": used})
    if rank == 0:
        print("RESULT " + json.dumps(every))


def start(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (2, os.path.join(folder, "store"), args), nprocs=2)
