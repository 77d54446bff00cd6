"""Fine-tune a new head on a frozen, pretrained convolutional backbone, keeping an exponential moving average.

The backbone is first trained for a few steps on a rotation task in this script. Then its convolutions are frozen
(`requires_grad_(False)`, BatchNorm kept in eval mode), only the head goes to the optimizer (Adam, MultiStepLR),
and evaluation uses the averaged weights. `--iters` counts the fine-tuning steps.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

GLYPHS = {
    "L": ["1000", "1000", "1000", "1111"],
    "F": ["1111", "1000", "1110", "1000"],
    "J": ["0011", "0001", "1001", "0110"],
    "P": ["1110", "1001", "1110", "1000"],
}


def glyph_images(count, seed):
    """Return images (count, 1, 12, 12), which glyph it is, and by how many quarter turns it was rotated."""
    g = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.tensor([[float(c) for c in row] for row in rows]) for rows in GLYPHS.values()])
    kind = torch.randint(0, len(table), (count,), generator=g)
    turns = torch.randint(0, 4, (count,), generator=g)
    images = 0.1 * torch.randn(count, 1, 12, 12, generator=g)
    offsets = torch.randint(1, 4, (count, 2), generator=g)
    for i, (k, t, (y, x)) in enumerate(zip(kind, turns.tolist(), offsets.tolist())):
        big = torch.rot90(table[k], t).repeat_interleave(2, 0).repeat_interleave(2, 1)
        images[i, 0, y : y + 8, x : x + 8] += big
    return images, kind, turns


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.out_features = 2 * width * 9

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.avg_pool2d(x, 2).flatten(1)


class Model(nn.Module):
    def __init__(self, backbone, classes, hidden):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(backbone.out_features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrain(backbone, images, turns, steps, batch_size):
    model = nn.Sequential(backbone, nn.Linear(backbone.out_features, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for step in range(steps):
        pick = torch.randint(0, len(images), (batch_size,))
        loss = F.cross_entropy(model(images[pick]), turns[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"pretraining step {step + 1} rotation loss {loss.item():.4f}", flush=True)


def freeze(module):
    module.eval()
    for p in module.parameters():
        p.requires_grad_(False)


@torch.no_grad()
def evaluate(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12, help="channels of the first convolution")
    parser.add_argument("--hidden", type=int, default=32, help="units of the new head")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--pretrain-iters", type=int, default=60)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    backbone = Backbone(args.width)
    images, _, turns = glyph_images(512, args.seed)
    pretrain(backbone, images, turns, args.pretrain_iters, args.batch_size)

    images, kind, _ = glyph_images(400, args.seed + 1)
    test_images, test_kind, _ = glyph_images(200, args.seed + 2)
    loader = DataLoader(TensorDataset(images, kind), batch_size=args.batch_size, shuffle=True)

    freeze(backbone)
    model = Model(backbone, len(GLYPHS), args.hidden)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, milestones=[args.iters // 2, 3 * args.iters // 4], gamma=0.3
    )

    losses, accuracy = [], []
    while len(losses) < args.iters:
        model.train()
        model.backbone.eval()                    # frozen statistics
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {loss.item():.4f}", flush=True)
            if len(losses) == args.iters:
                break
        accuracy.append(evaluate(ema, test_images, test_kind))
        print(f"test accuracy of the averaged model {accuracy[-1]:.3f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
