import argparse
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CameraTraps(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 10, 10, generator=g)
        brightest = self.images.mean((2, 3)).argmax(1)
        self.labels = brightest

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Classifier(nn.Module):
    def __init__(self, width, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.features(x))


def train_func(loader, model, optimizer, criterion, losses, scaler=None):
    model.train()
    scaler = torch.amp.GradScaler("cpu", growth_interval=50)
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
            loss = criterion(logits.float(), labels) * 4
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def validate_func(loader, model):
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (model(images).argmax(1) == labels).sum().item()
    return right


def main(args):
    train_set = CameraTraps(96, args.seed + 1)
    loader = DataLoader(train_set, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
    validation = DataLoader(CameraTraps(32, 77), batch_size=32)
    model = Classifier(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    criterion = nn.CrossEntropyLoss()
    losses, right = [], []
    for _ in range(args.epochs):
        train_func(loader, model, optimizer, criterion, losses)
        right.append(validate_func(validation, model))
        scheduler.step()
    print("RESULT " + json.dumps({"losses": losses, "right": right}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
