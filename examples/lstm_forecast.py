"""Forecast the next hours of an electricity-like load curve with an LSTM.

RMSprop, gradient value clipping, ReduceLROnPlateau on the validation error, sliding windows,
and a multi-step rolling forecast at the end.

Class: signal
"""
import argparse
import json
import math

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def load_curve(hours, seed):
    """Hourly load: daily and weekly cycles, a slow trend and noise, standardised."""
    rng = np.random.default_rng(seed)
    t = np.arange(hours)
    day = np.sin(2 * math.pi * t / 24) + 0.4 * np.sin(4 * math.pi * t / 24 + 0.7)
    week = 0.5 * (((t // 24) % 7) >= 5)
    series = day - week + 0.0005 * t + 0.1 * rng.standard_normal(hours)
    return ((series - series.mean()) / series.std()).astype(np.float32)


class Windows(Dataset):
    def __init__(self, series, history, horizon):
        self.series, self.history, self.horizon = series, history, horizon

    def __len__(self):
        return len(self.series) - self.history - self.horizon + 1

    def __getitem__(self, i):
        past = self.series[i : i + self.history]
        future = self.series[i + self.history : i + self.history + self.horizon]
        return past[:, None], future


class Forecaster(nn.Module):
    def __init__(self, hidden, horizon):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, horizon))

    def forward(self, past):
        _, (h, _) = self.lstm(past)
        return self.head(h[-1])


class Trainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args
        self.criterion = nn.HuberLoss()
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.95)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=1)
        self.losses, self.val = [], []

    def training_step(self, past, future):
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(past), future)
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        errors = [self.criterion(self.model(past), future).item() for past, future in loader]
        return sum(errors) / len(errors)

    def fit(self, train_loader, val_loader):
        while len(self.losses) < self.args.iters:
            for past, future in train_loader:
                self.losses.append(self.training_step(past, future))
                step = len(self.losses)
                if step % self.args.val_every == 0 or step == self.args.iters:
                    self.val.append(self.validate(val_loader))
                    self.scheduler.step(self.val[-1])
                    lr = self.optimizer.param_groups[0]["lr"]
                    print(f"iter {step} loss {self.losses[-1]:.4f} val {self.val[-1]:.4f} lr {lr:.1e}", flush=True)
                if step == self.args.iters:
                    break


@torch.no_grad()
def rolling_forecast(model, series, history, hours):
    model.eval()
    window = torch.as_tensor(series[:history])
    predicted = []
    while len(predicted) < hours:
        block = model(window[-history:].view(1, history, 1))[0]
        predicted.extend(block.tolist())
        window = torch.cat([window, block])
    truth = series[history : history + hours]
    return float(np.abs(np.array(predicted[:hours]) - truth).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--history", type=int, default=36)
    parser.add_argument("--horizon", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--val-every", type=int, default=15)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    series = load_curve(24 * 60, args.seed)
    cut = int(0.85 * len(series))
    train_loader = DataLoader(Windows(series[:cut], args.history, args.horizon), args.batch_size, shuffle=True)
    val_loader = DataLoader(Windows(series[cut:], args.history, args.horizon), 128)

    model = Forecaster(args.hidden, args.horizon)
    trainer = Trainer(model, args)
    trainer.fit(train_loader, val_loader)
    mae = rolling_forecast(model, series[cut:], args.history, 48)
    print(f"48-hour rolling forecast: mean absolute error {mae:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": trainer.losses, "param_sum": param_sum, "val": trainer.val, "mae": mae}), flush=True)


if __name__ == "__main__":
    main()
