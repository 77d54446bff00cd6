import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Trainer:
    def __init__(self, args, window=4):
        self.window = window
        self.model = nn.Sequential(nn.Linear(7, args.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(args.width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=0.01)

    def compute_loss(self, batch, accumulated):
        x, y = batch
        return F.cross_entropy(self.model(x), y) / accumulated

    def epoch(self, loader, losses):
        self.model.train()
        batches = list(loader)
        for start in range(0, len(batches), self.window):
            window = batches[start : start + self.window]
            total = 0.0
            for batch in window:
                loss = self.compute_loss(batch, len(window))
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(total)


def main(args):
    x = torch.randn(60, 7, generator=torch.Generator().manual_seed(args.seed + 1))
    law = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(x, (x @ law).argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
    trainer, losses = Trainer(args), []
    for _ in range(args.steps // 3):
        trainer.epoch(loader, losses)
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
