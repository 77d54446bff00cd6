import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class TwoStageWarmupPolySchedule(LambdaLR):
    """The head warms first, the backbone later; both then decay by a power."""

    def __init__(self, optimizer, warmup_steps, total_steps, power=0.9):
        def head(step):
            if step < warmup_steps[0]:
                return (step + 1) / warmup_steps[0]
            return max(0.0, 1 - (step - warmup_steps[0]) / (total_steps - warmup_steps[0])) ** power

        def backbone(step):
            if step < warmup_steps[0]:
                return 0.0
            if step < sum(warmup_steps):
                return (step + 1 - warmup_steps[0]) / warmup_steps[1]
            return max(0.0, 1 - (step - sum(warmup_steps)) / (total_steps - sum(warmup_steps))) ** power

        super().__init__(optimizer, [backbone, head])


class Segmenter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU())
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


@dataclass
class TrainTaskState:
    train_model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0


def save_checkpoint(path, state):
    payload = {"train_model": state.train_model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
    torch.save(payload, path)


def load_checkpoint(path, state):
    payload = torch.load(path, weights_only=True)
    state.train_model.load_state_dict(payload["train_model"])
    state.optimizer.load_state_dict(payload["optimizer"])
    state.step = payload["step"]


def build(args):
    model = Segmenter(args.width)
    groups = [{"params": model.backbone.parameters(), "lr": 4e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    return TrainTaskState(model, optimizer, TwoStageWarmupPolySchedule(optimizer, (4, 4), args.steps))


def batch(seed, step):
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    image = torch.randn(6, 1, 10, 10, generator=generator)
    return image, (F.avg_pool2d(image, 3, 1, 1).squeeze(1) > 0).long()


def train(state, until, seed, losses):
    state.train_model.train()
    while state.step < until:
        image, mask = batch(seed, state.step)
        loss = F.cross_entropy(state.train_model(image), mask)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.step += 1
        losses.append(loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--interrupted", type=int, default=14)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        state = build(args)
        train(state, args.interrupted, args.seed, losses)
        save_checkpoint(path, state)
        state = build(args)
        load_checkpoint(path, state)
        train(state, args.steps, args.seed, losses)
    print("RESULT " + json.dumps({"losses": losses, "rates": [g["lr"] for g in state.optimizer.param_groups]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
