"""Linear probing, then fine-tuning of everything (LP-FT) on transformed digits of a seven-segment display.

Tricky: in the first phase the backbone is frozen, yet its dropout is on and its BatchNorm goes on measuring; in the
second a new optimizer of another kind, over all parameters and with a schedule, replaces the first. The backbone comes
from a rotation pretext task.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

# Segments a–g of the digits 0–9.
SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
STROKES = {
    "a": (0, 1, 0, 5), "b": (1, 5, 4, 5), "c": (5, 9, 4, 5), "d": (8, 9, 0, 5), "e": (5, 9, 0, 1), "f": (1, 5, 0, 1),
    "g": (4, 5, 0, 5),
}


def digits(count, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=g)
    images = torch.zeros(count, 1, 14, 14)
    shifts = torch.randint(0, 5, (count, 2), generator=g).tolist()
    for image, label, (dy, dx) in zip(images, labels.tolist(), shifts):
        for segment in SEGMENTS[label]:
            top, bottom, left, right = STROKES[segment]
            image[0, dy + top:dy + bottom, dx + left:dx + right] = 1
    return images + 0.15 * torch.randn(images.shape, generator=g), labels


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.dropout(self.norm(F.relu(self.conv2(F.relu(self.conv1(x))))).flatten(1))


def fit(name, model, optimizer, scheduler, data, steps, batch_size):
    images, labels = data
    losses = []
    model.train()
    for _ in range(steps):
        rows = torch.randint(0, len(labels), (batch_size,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 5.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    if losses:
        print(f"{name}: {steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--pretrain-iters", type=int, default=30)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    images, labels = digits(600, args.seed)
    turns = torch.randint(0, 4, (len(images),))
    turned = torch.stack([image.rot90(int(k), (1, 2)) for image, k in zip(images, turns)])

    backbone = Backbone(args.width)
    pretext = nn.Sequential(backbone, nn.Linear(16 * args.width, 4))
    fit("pretext", pretext, torch.optim.Adam(pretext.parameters(), lr=5e-3), None, (turned, turns), args.pretrain_iters, 32)

    model = nn.Sequential(backbone, nn.Linear(16 * args.width, 10))
    backbone.requires_grad_(False)
    probe = torch.optim.SGD(model[1].parameters(), lr=10 * args.lr, momentum=0.9)
    losses = fit("probe", model, probe, None, (images, labels), args.iters // 2, args.batch_size)

    backbone.requires_grad_(True)
    rest = args.iters - args.iters // 2
    finetune = torch.optim.AdamW(model.parameters(), lr=args.lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(finetune, rest)
    losses += fit("fine-tune", model, finetune, cosine, (images, labels), rest, args.batch_size)

    model.eval()
    images, labels = digits(200, args.seed + 1)
    with torch.inference_mode():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
