import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class PretrainingBatchSampler:
    """Batches of a dataset in order; `consumed_samples` were seen before a restart."""

    def __init__(self, total_samples, consumed_samples, batch_size):
        self.total_samples, self.consumed_samples, self.batch_size = total_samples, consumed_samples, batch_size

    def __len__(self):
        return self.total_samples // self.batch_size

    def __iter__(self):
        begin = self.consumed_samples % self.total_samples
        for at in range(begin, self.total_samples - self.batch_size + 1, self.batch_size):
            yield list(range(at, at + self.batch_size))


def cyclic_iter(loader):
    while True:
        yield from loader


def build(args):
    model = nn.ModuleDict({"embed": nn.Embedding(15, args.width), "mix": nn.GRU(args.width, args.width, batch_first=True), "head": nn.Linear(args.width, 15)})
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3)


def train(model, optimizer, batches, steps, losses):
    for _ in range(steps):
        (ids,) = next(batches)
        hidden, _ = model["mix"](model["embed"](ids[:, :-1]))
        loss = F.cross_entropy(model["head"](hidden).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    start, stride = torch.randint(0, 15, (48, 1), generator=generator), torch.randint(1, 4, (48, 1), generator=generator)
    data = torch.utils.data.TensorDataset((start + stride * torch.arange(9)) % 15)

    def batches(consumed):
        return cyclic_iter(torch.utils.data.DataLoader(data, batch_sampler=PretrainingBatchSampler(len(data), consumed, 8)))

    losses = []
    model, optimizer = build(args)
    train(model, optimizer, batches(0), 3, losses)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "consumed": 24}
    model, optimizer = build(args)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, batches(saved["consumed"]), args.steps - 3, losses)
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
