import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.outc = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        high = self.inc(x)
        return self.outc(torch.cat([high, self.up(self.down(high))], 1))


def dice_loss(p, y):
    return 1 - (2 * (p * y).sum((1, 2, 3)) + 1e-6).div(p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1e-6).mean()


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = UNet(args.width // 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=True)
    losses = []
    for _ in range(args.steps):
        truth = (torch.rand(4, 1, 4, 4, generator=generator) > 0.5).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
        images = truth + 0.5 * torch.randn(4, 1, 16, 16, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits.float(), truth) + dice_loss(logits.float().sigmoid(), truth)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
