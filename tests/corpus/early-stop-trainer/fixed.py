"""Classify noisy waves with a recurrent network through a small trainer, with gradient accumulation."""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib_fixed"))

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from minitrainer import Trainer, TrainingArguments


class Waves(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])


def compute_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=6)
    ap.add_argument("--width", type=int, default=12)
    ap.add_argument("--seed", type=int, default=0)
    opts = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(opts.seed)
    y = torch.randint(3, (144,))
    t = torch.linspace(0, 6.28, 16)
    data = TensorDataset(torch.sin(t * (1 + y).unsqueeze(1)) + 0.1 * torch.randn(144, 16), y)
    args = TrainingArguments(
        num_train_epochs=opts.epochs, batch_size=opts.batch_size, gradient_accumulation_steps=opts.accum,
        learning_rate=5e-3, seed=opts.seed,
    )
    state = Trainer(Waves(opts.width), args, data, compute_loss).train()
    print("RESULT " + json.dumps({"losses": args.history, "steps": state.global_step}))


if __name__ == "__main__":
    main()
