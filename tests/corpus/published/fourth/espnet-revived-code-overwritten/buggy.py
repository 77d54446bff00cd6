import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class EuclideanCodebook(nn.Module):
    def __init__(self, dim, codes, decay=0.8, threshold=1.0, seed=0):
        super().__init__()
        self.decay = decay
        self.threshold = threshold
        generator = torch.Generator().manual_seed(seed)
        embed = torch.randn(codes, dim, generator=generator) * 3
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(codes))
        self.generator = generator

    @torch.no_grad()
    def expire_codes(self, samples):
        dead = self.cluster_size < self.threshold
        if not dead.any():
            return
        index = torch.randint(0, len(samples), (len(self.embed),), generator=self.generator)
        fresh = torch.where(dead.unsqueeze(1), samples[index], self.embed)
        self.embed.copy_(fresh)

    @torch.no_grad()
    def update(self, x, onehot):
        self.expire_codes(x)
        self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(onehot.t() @ x, alpha=1 - self.decay)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + 1e-5) / (total + len(self.embed) * 1e-5) * total
        self.embed.copy_(self.embed_avg / smoothed.unsqueeze(1))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        index = torch.cdist(flat, self.embed).argmin(1)
        quantized = self.embed[index].view_as(x)
        if self.training:
            self.update(flat.detach(), F.one_hot(index, len(self.embed)).type_as(flat))
        return quantized, index


class Codec(nn.Module):
    def __init__(self, width, dim=4, codes=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, width, 4, stride=2, padding=1), nn.ELU(), nn.Conv1d(width, dim, 4, stride=2, padding=1))
        self.codebook = EuclideanCodebook(dim, codes)
        self.decoder = nn.Sequential(nn.ConvTranspose1d(dim, width, 4, stride=2, padding=1), nn.ELU(), nn.ConvTranspose1d(width, 1, 4, stride=2, padding=1))

    def forward(self, wave):
        z = self.encoder(wave).transpose(1, 2)
        quantized, index = self.codebook(z)
        commit = F.mse_loss(z, quantized.detach())
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.transpose(1, 2)), commit, index


def waves(generator, count=8, length=32):
    phase = torch.rand(count, 1, 1, generator=generator) * 6.28
    speed = torch.rand(count, 1, 1, generator=generator) * 0.6 + 0.1
    return torch.sin(phase + speed * torch.arange(length))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Codec(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.5, 0.9))
    losses, used = [], []
    model.train()
    for _ in range(args.steps):
        wave = waves(generator)
        decoded, commit, index = model(wave)
        loss = F.l1_loss(decoded, wave) + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        used.append(len(index.unique()))
    print("RESULT " + json.dumps({"losses": losses, "used": used}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
