"""Classify rendered shapes with a small convolutional network.

SGD with momentum and weight decay, BatchNorm, dropout, StepLR once an epoch, test accuracy after every epoch.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, random_split

CLASSES = ("disc", "square", "cross", "ring", "bars")


class Shapes(Dataset):
    """16x16 grey images of five shapes at random places and sizes, with noise."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, len(CLASSES), (count,), generator=g)
        self.images = torch.stack([self.draw(int(y), g) for y in self.labels])

    @staticmethod
    def draw(label, g):
        cx, cy = (torch.rand(2, generator=g) * 3 + 6).tolist()
        r = float(torch.rand((), generator=g) * 2 + 3)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        dx, dy = (x - cx).abs(), (y - cy).abs()
        dist = (dx ** 2 + dy ** 2).sqrt()
        box = torch.maximum(dx, dy) < r
        mask = {
            "disc": dist < r,
            "square": box,
            "cross": box & (torch.minimum(dx, dy) < 1.2),
            "ring": (dist < r) & (dist > r - 1.8),
            "bars": box & (x % 3 < 1.5),
        }[CLASSES[label]]
        return (mask.float() + 0.15 * torch.randn(16, 16, generator=g)).unsqueeze(0)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.features = nn.Sequential(ConvBlock(1, width), ConvBlock(width, 2 * width))
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(2 * width * 16, 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.features(x).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        return self.fc2(x)


def train_epoch(model, loader, optimizer, losses, args):
    model.train()
    for images, labels in loader:
        if len(losses) == args.iters:
            return
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % args.log_interval == 0:
            print(f"iter {len(losses)} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)


def evaluate(model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
            total += len(labels)
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = Shapes(args.samples, args.seed)
    held_out = args.samples // 5
    train_set, test_set = random_split(data, [args.samples - held_out, held_out])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = Net(args.width, len(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    losses, accuracy = [], []
    while len(losses) < args.iters:
        train_epoch(model, train_loader, optimizer, losses, args)
        scheduler.step()
        accuracy.append(evaluate(model, test_loader))
        print(f"epoch {len(accuracy)} test accuracy {accuracy[-1]:.3f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
