"""Segmentation of blobs with a small U-Net whose encoder stages recompute their activations.

Tricky: `torch.utils.checkpoint` runs the stages a second time inside backward, so forwards happen within it,
dropout is replayed with the same random state. Both variants of checkpointing are used: non-reentrant and
reentrant.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def stage(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.1),
        nn.Dropout2d(0.05), nn.Conv2d(outputs, outputs, 3, padding=1), nn.LeakyReLU(0.1),
    )


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1, self.down2 = stage(1, width), stage(width, 2 * width)
        self.middle = stage(2 * width, 2 * width)
        self.up2, self.up1 = stage(4 * width, width), stage(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def recompute(self, part, x, reentrant=False):
        return checkpoint(part, x, use_reentrant=reentrant) if self.training else part(x)

    def forward(self, x):
        first = self.recompute(self.down1, x)
        second = self.recompute(self.down2, F.max_pool2d(first, 2))
        h = self.recompute(self.middle, F.max_pool2d(second, 2), reentrant=True)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), second], 1))
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2), first], 1))
        return self.out(h)


def scenes(count, size, seed):
    """Noisy images with two ellipses, and their masks."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    p = torch.rand(count, 2, 4, 1, 1, generator=g)
    across = (x - 1.4 * p[:, :, 0] + 0.7) / (0.2 + 0.3 * p[:, :, 2])
    along = (y - 1.4 * p[:, :, 1] + 0.7) / (0.2 + 0.3 * p[:, :, 3])
    masks = (across ** 2 + along ** 2 < 1).any(1, keepdim=True).float()
    return masks + 0.4 * torch.randn(masks.shape, generator=g), masks


def dice_loss(logits, masks):
    probability = logits.sigmoid()
    overlap = 2 * (probability * masks).sum() + 1
    return 1 - overlap / (probability.sum() + masks.sum() + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    images, masks = scenes(160, 24, args.seed)
    net = UNet(args.width)
    optimizer = torch.optim.Adamax(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.iters, power=0.9)

    losses = []
    net.train()
    for it in range(1, args.iters + 1):
        rows = torch.randperm(len(images))[:args.batch_size]
        logits = net(images[rows])
        loss = F.binary_cross_entropy_with_logits(logits, masks[rows]) + dice_loss(logits, masks[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    net.eval()
    images, masks = scenes(24, 24, args.seed + 1)
    with torch.no_grad():
        iou = ((net(images) > 0) & (masks > 0)).sum() / ((net(images) > 0) | (masks > 0)).sum()
    param_sum = sum(p.detach().double().abs().sum().item() for p in net.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "iou": iou.item()}), flush=True)


if __name__ == "__main__":
    main()
