import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class BatchSamplerShard:
    def __init__(self, size, batch_size, seed, skip_batches=0):
        self.size, self.batch_size, self.seed, self.skip_batches = size, batch_size, seed, skip_batches
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // self.batch_size

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for i in range(self.skip_batches, len(self)):
            yield order[i * self.batch_size : (i + 1) * self.batch_size].tolist()


class Trainer:
    def __init__(self, args):
        self.args = args
        x = torch.randn(64, 9, generator=torch.Generator().manual_seed(args.seed + 1))
        self.data = torch.utils.data.TensorDataset(x, (x[:, :4].sum(1) > 0).long())
        self.model = nn.Sequential(nn.Linear(9, args.width), nn.ReLU(), nn.Linear(args.width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)

    def get_train_dataloader(self, skip_batches=0):
        sampler = BatchSamplerShard(len(self.data), 8, self.args.seed, skip_batches)
        return torch.utils.data.DataLoader(self.data, batch_sampler=sampler)

    def skip_first_batches(self, loader, n):
        skipped = self.get_train_dataloader(skip_batches=n)
        skipped.batch_sampler.set_epoch(loader.batch_sampler.epoch)
        return skipped

    def train(self, losses, state, until):
        loader = self.get_train_dataloader()
        step = state["step"]
        for epoch in range(step // len(loader), 100):
            loader.batch_sampler.set_epoch(epoch)
            epoch_loader = self.skip_first_batches(loader, step % len(loader)) if step % len(loader) else loader
            for x, y in epoch_loader:
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
                step += 1
                if step == until:
                    return {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def main(args):
    losses = []
    saved = Trainer(args).train(losses, {"step": 0}, 12)
    resumed = Trainer(args)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.train(losses, saved, args.steps)
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
