"""Pick the largest of a set of numbers with an embedding bag through a small trainer, accumulating three batches."""
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


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 24)
        self.out = nn.Linear(24, 20)

    def forward(self, x):
        return self.out(self.bag(x))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    opts = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(opts.seed)
    x = torch.randint(20, (240, 4))
    args = TrainingArguments(
        num_train_epochs=3, batch_size=16, gradient_accumulation_steps=3, learning_rate=2e-2, seed=opts.seed
    )
    state = Trainer(Largest(), args, TensorDataset(x, x.max(1).values), loss_of).train()
    print("RESULT " + json.dumps({"losses": args.history, "steps": state.global_step}))
