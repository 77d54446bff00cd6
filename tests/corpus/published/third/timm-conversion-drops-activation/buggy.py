import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, features):
        super().__init__(features)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class SyncBatchNormAct(nn.SyncBatchNorm):
    def forward(self, x):
        return self.act(super().forward(x))


def convert_sync_batchnorm(module):
    """As torch's, and norms with an activation keep it."""
    if isinstance(module, BatchNormAct2d):
        made = SyncBatchNormAct(module.num_features, module.eps, module.momentum)
        made.load_state_dict(module.state_dict())
        made.act = module.act
        return made
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    return module


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), BatchNormAct2d(width)
        self.conv_dw, self.bn2 = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False), BatchNormAct2d(width)
        self.classifier = nn.Linear(width, 4)

    def forward(self, x):
        x = self.bn1(self.conv_stem(x))
        x = x + self.bn2(self.conv_dw(x))
        return self.classifier(x.mean((2, 3)))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(args.steps):
        labels = torch.randint(0, 4, (12,), generator=generator)
        images = torch.randn(12, 3, 8, 8, generator=generator) * (0.5 + 0.5 * labels[:, None, None, None])
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
