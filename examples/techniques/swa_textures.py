"""Stochastic weight averaging (SWA) of a texture classifier.

Tricky: after three quarters of the run the schedule changes to a constant high rate and an averaged copy starts to
follow; the copy is never trained, and its BatchNorm statistics are measured by `update_bn` in a pass without
gradients.

Class: vision
"""
import argparse
import json

import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def textures(count, seed):
    """Noise filtered in four ways: raw, smooth, horizontal, vertical."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 1, 18, 18, generator=g)
    kernels = torch.zeros(4, 1, 5, 5)
    kernels[0, 0, 2, 2] = 1
    kernels[1] = 0.2
    kernels[2, 0, 2] = 0.45
    kernels[3, 0, :, 2] = 0.45
    labels = torch.randint(0, 4, (count,), generator=g)
    filtered = nn.functional.conv2d(noise, kernels)
    return TensorDataset(filtered[torch.arange(count), labels].unsqueeze(1), labels)


def conv_net(width, classes=4):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes),
    )


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [(model(x).argmax(1) == y).float() for x, y in loader]
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    loader = DataLoader(textures(128, args.seed), args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(textures(200, args.seed + 1), 100)
    epochs = -(-args.iters // len(loader))
    swa_start = 3 * epochs // 4

    model = conv_net(args.width)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, swa_start))
    averaged = AveragedModel(model)
    swa_scheduler = SWALR(optimizer, swa_lr=args.lr / 2, anneal_epochs=2)

    losses = []
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            if len(losses) == args.iters:
                break
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch >= swa_start:
            averaged.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        print(f"epoch {epoch} loss {losses[-1]:.4f} lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)

    update_bn(loader, averaged)
    scores = {"plain": accuracy(model, test_loader), "averaged": accuracy(averaged, test_loader)}
    print(f"test accuracy {scores}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in averaged.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, **scores}), flush=True)


if __name__ == "__main__":
    main()
