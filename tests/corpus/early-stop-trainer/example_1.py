"""Fit a surface with an MLP through a small trainer."""
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


def squared_error(model, batch):
    x, y = batch
    return F.mse_loss(model(x).squeeze(-1), y)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    opts = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(opts.seed)
    x = torch.rand(200, 2)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    args = TrainingArguments(num_train_epochs=1, batch_size=10, learning_rate=1e-2, seed=opts.seed)
    state = Trainer(model, args, TensorDataset(x, (3 * x[:, 0]).sin() * x[:, 1]), squared_error).train()
    print("RESULT " + json.dumps({"losses": args.history, "steps": state.global_step}))
