"""Vision transformer trained in mixed precision: bf16 autocast with a gradient scaler, accumulation and clipping.

The loop is the one GPU users write (scale, backward, unscale_, clip, scaler.step, scaler.update); on a CPU the same
calls go to the CPU backend. AdamW, OneCycleLR stepped once per optimizer step, evaluation under autocast.

Class: vision
"""
import argparse
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def textures(count, classes, size, seed):
    """Oriented gratings; the class is the orientation, frequency and phase vary."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=g)
    angle = labels * math.pi / classes
    frequency = 0.8 + 0.4 * torch.rand(count, generator=g)
    phase = 2 * math.pi * torch.rand(count, generator=g)
    y, x = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    wave = (torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y) * frequency[:, None, None]
    images = torch.sin(wave + phase[:, None, None]) + 0.3 * torch.randn(count, size, size, generator=g)
    return images[:, None], labels


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, size, patch, dim, heads, depth, classes):
        super().__init__()
        self.patchify = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim) * 0.02)
        self.layers = nn.ModuleList([EncoderLayer(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def endless(loader):
    while True:
        yield from loader


def evaluate(model, images, labels, device):
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images.to(device))
    return (logits.argmax(1).cpu() == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32, help="token dimension, a multiple of --heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="images of one micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    classes, size = 6, 16
    train = TensorDataset(*textures(1024, classes, size, args.seed))
    test_images, test_labels = textures(200, classes, size, args.seed + 1)
    batches = endless(DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True))

    model = ViT(size, 4, args.width, args.heads, args.depth, classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.iters + 1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** 10, growth_interval=20)

    losses, accuracy = [], []
    for it in range(1, args.iters + 1):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(args.accumulate):
            images, labels = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(images.to(device))
                loss = F.cross_entropy(logits, labels.to(device), label_smoothing=0.05) / args.accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(total)
        if it % 10 == 0 or it == args.iters:
            accuracy.append(evaluate(model, test_images, test_labels, device))
            print(f"iter {it} loss {total:.4f} norm {norm.item():.2f} scale {scaler.get_scale():.0f} test {accuracy[-1]:.3f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
