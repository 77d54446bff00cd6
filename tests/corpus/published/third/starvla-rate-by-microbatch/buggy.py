import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words = nn.EmbeddingBag(12, width)
        self.actor = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, image, words):
        return self.actor(torch.cat([self.vision(image), self.words(words)], 1))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    accumulate = 3
    model = Policy(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm, decay])
    losses = []
    for micro in range(accumulate * args.steps):
        sync_gradients = micro % accumulate == accumulate - 1
        image, words = torch.randn(6, 3, 9, 9, generator=generator), torch.randint(0, 12, (6, 4), generator=generator)
        target = torch.stack([image.mean((1, 2, 3)) * 5, words.float().mean(1) / 6 - 1, image[:, 0].amax((1, 2)) - 2], 1)
        loss = F.l1_loss(model(image, words), target)
        (loss / accumulate).backward()
        if sync_gradients:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
