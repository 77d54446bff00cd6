import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time_proj = nn.Linear(1, width)
        self.text_proj = nn.Linear(6, width)
        self.down = nn.Conv1d(2, width, 3, padding=1)
        self.mid = nn.Conv1d(width, width, 3, padding=1)
        self.up = nn.Conv1d(2 * width, 2, 3, padding=1)

    def forward(self, x, t, text):
        shift = (self.time_proj(t) + self.text_proj(text)).unsqueeze(-1)
        low = F.silu(self.down(x) + shift)
        return self.up(torch.cat([low, F.silu(self.mid(low))], 1))


class DDPM:
    def __init__(self, steps=50):
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.1, steps), 0)

    def add_noise(self, x, noise, t):
        a = self.alphas[t].view(-1, 1, 1)
        return a.sqrt() * x + (1 - a).sqrt() * noise


def unwrap_model(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def prepare_dataset(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    text = torch.randn(96, 6, generator=generator)
    latents = torch.sin(text[:, :2].unsqueeze(-1) * torch.arange(8) * 0.5)
    return TensorDataset(latents, text)


def train(rank, world, args):
    torch.manual_seed(args.seed)
    dataset = prepare_dataset(args.seed)
    sampler = DistributedSampler(dataset, world, rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    unet = DistributedDataParallel(UNet(args.width))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-3)
    unet = unwrap_model(unet)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 4)
    noise_scheduler = DDPM()
    generator = torch.Generator().manual_seed(args.seed + 10 + rank)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        unet.train()
        for latents, text in loader:
            noise = torch.randn(latents.shape, generator=generator)
            t = torch.randint(0, 50, (len(latents),), generator=generator)
            predicted = unet(noise_scheduler.add_noise(latents, noise, t), t.unsqueeze(1) / 50, text)
            loss = F.mse_loss(predicted, noise)
            loss.backward()
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    every = [None] * world
    dist.all_gather_object(every, losses)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": every}))


def launch(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(launch, (2, os.path.join(folder, "store"), args), nprocs=2)
