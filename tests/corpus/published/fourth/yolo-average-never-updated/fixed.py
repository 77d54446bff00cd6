import argparse
import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class TrainConfig:
    epochs: int = 4
    batch_size: int = 16
    lr: float = 0.02
    momentum: float = 0.9
    ema_decay: float = 0.7


class ExponentialMovingAverage:
    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {name: p.clone().detach() for name, p in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def apply_shadow(self):
        for name, p in self.model.named_parameters():
            self.backup[name] = p.clone()
            p.copy_(self.shadow[name])

    @torch.no_grad()
    def restore(self):
        for name, p in self.model.named_parameters():
            p.copy_(self.backup[name])


class Detector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU(),
        )
        self.box = nn.Conv2d(width, 4, 1)
        self.cls = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        features = self.backbone(x)
        return self.box(features).mean((2, 3)), self.cls(features).mean((2, 3))


class ModelTrainer:
    def __init__(self, model, cfg):
        self.model = model
        self.cfg = cfg
        self.optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
        self.ema = ExponentialMovingAverage(model, cfg.ema_decay)
        self.history = []

    def train_one_batch(self, image, box, label):
        self.optimizer.zero_grad()
        predicted_box, logits = self.model(image)
        loss = F.smooth_l1_loss(predicted_box, box) + F.cross_entropy(logits, label)
        loss.backward()
        self.optimizer.step()
        self.ema.update()
        return loss.item()

    def train_one_epoch(self, loader):
        self.model.train()
        for image, box, label in loader:
            self.history.append(self.train_one_batch(image, box, label))

    def save_checkpoint(self):
        self.ema.apply_shadow()
        state = {"model": {k: v.clone() for k, v in self.model.state_dict().items()}}
        self.ema.restore()
        return state

    def solve(self, loader):
        for _ in range(self.cfg.epochs):
            self.train_one_epoch(loader)
            self.last = self.save_checkpoint()
        return self.history


def dataset(seed):
    g = torch.Generator().manual_seed(seed + 1)
    image = torch.randn(96, 1, 12, 12, generator=g)
    box = torch.stack([image[:, 0, :6].mean((1, 2)), image[:, 0, 6:].mean((1, 2)), image.amax((1, 2, 3)), image.amin((1, 2, 3))], 1)
    return TensorDataset(image, box, (image[:, 0, 0] .sum(1) > 0).long() + (image[:, 0, :, 0].sum(1) > 0).long())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    cfg = TrainConfig(epochs=args.epochs)
    loader = DataLoader(dataset(args.seed), batch_size=cfg.batch_size, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
    trainer = ModelTrainer(Detector(args.width), cfg)
    losses = trainer.solve(loader)
    saved = sum(v.double().abs().sum().item() for v in trainer.last["model"].values())
    print("RESULT " + json.dumps({"losses": losses, "saved": saved}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
