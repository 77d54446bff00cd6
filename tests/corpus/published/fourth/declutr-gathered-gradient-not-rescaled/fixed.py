import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def all_gather_anchor_positive_pairs(anchors, positives):
    if not dist.is_initialized():
        return anchors, positives
    gathered = []
    for own in (anchors, positives):
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        parts[dist.get_rank()] = own
        gathered.append(torch.cat(parts, 0))
    return gathered[0], gathered[1]


class NTXentLoss(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature

    def forward(self, anchors, positives):
        both = F.normalize(torch.cat([anchors, positives]), dim=-1)
        similarity = both @ both.t() / self.temperature
        similarity = similarity.masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
        target = torch.arange(len(both)).roll(len(anchors))
        return F.cross_entropy(similarity, target)


class DeCLUTR(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedder = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.feedforward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def embed(self, tokens):
        return self.feedforward(self.encoder(self.embedder(tokens))[0].mean(1))

    def forward(self, tokens):
        anchors, positives = tokens
        return self.embed(anchors), self.embed(positives)


class GradientDescentTrainer:
    def __init__(self, model, loss, args):
        self.model, self.loss, self.args = model, loss, args
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.25, total_iters=5)

    def batch_outputs(self, batch):
        anchors, positives = self.model(batch)
        anchors, positives = all_gather_anchor_positive_pairs(anchors, positives)
        loss = self.loss(anchors, positives)
        loss = loss * dist.get_world_size()
        return loss

    def train(self, batches):
        losses = []
        self.model.train()
        for batch in batches:
            for p in self.model.parameters():
                p.grad = None
            loss = self.batch_outputs(batch)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def documents(args, rank):
    generator = torch.Generator().manual_seed(args.seed * 100 + rank)
    for _ in range(args.steps):
        topic = torch.randint(0, 5, (8, 1), generator=generator) * 6
        spans = [topic + torch.randint(0, 6, (8, 7), generator=generator) for _ in range(2)]
        yield spans[0], spans[1]


def process(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    trainer = GradientDescentTrainer(DistributedDataParallel(DeCLUTR(30, args.width)), NTXentLoss(), args)
    losses = trainer.train(documents(args, rank))
    total = sum(p.double().abs().sum().item() for p in trainer.model.parameters())
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses, "total": total}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (2, os.path.join(folder, "store"), args), nprocs=2)
