import argparse
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Bottleneck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(h)))


class VisualBackbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layers = nn.Sequential(Bottleneck(width), Bottleneck(width))

    def forward(self, x):
        return self.layers(self.stem(x)).mean((2, 3))


def pretrained(width, generator):
    """Stands for a checkpoint: statistics of other images are in its norms."""
    backbone = VisualBackbone(width)
    backbone.train()
    with torch.no_grad():
        for _ in range(20):
            backbone(torch.randn(16, 3, 11, 11, generator=generator) * 2 + 1)
    return backbone


def cycle(loader):
    while True:
        yield from loader


def main(_A):
    torch.manual_seed(_A.seed)
    generator = torch.Generator().manual_seed(_A.seed + 1)
    images = torch.randn(80, 3, 11, 11, generator=generator)
    labels = images[:, :, :5].mean((2, 3)).argmax(1)
    train_dataloader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(_A.seed))

    visual = pretrained(_A.width, generator)
    model = nn.Sequential()
    model.add_module("visual", visual)
    model.add_module("fc", nn.Linear(_A.width, 3))
    nn.init.normal_(model.fc.weight, mean=0.0, std=0.01)
    nn.init.constant_(model.fc.bias, 0.0)

    for param in model.visual.parameters():
        param.requires_grad = False

    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.3, momentum=0.9, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[12, 18], gamma=0.1)
    criterion = nn.CrossEntropyLoss()

    model.train()
    model.visual.eval()
    losses = []
    iterations = cycle(train_dataloader)
    for iteration in range(_A.num_iterations):
        image, label = next(iterations)
        optimizer.zero_grad()
        logits = model(image)
        loss = criterion(logits, label)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("Linear evaluation on a frozen visual backbone")
    parser.add_argument("--num-iterations", type=int, default=22)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    main(parser.parse_args())
