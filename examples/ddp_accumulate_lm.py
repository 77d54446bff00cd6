"""Word-level LSTM language model on data/logbook.txt with DDP, gradient accumulation under `no_sync`, and clipping.

Every rank reads its own contiguous part of the book with truncated back-propagation through time (hidden state carried
over micro-batches and detached). Adam, exponential decay of the learning rate, perplexity averaged over ranks.
Runs alone or under torchrun.

Class: language
"""
import argparse
import contextlib
import json
import math
import os
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

TEXT = Path(__file__).resolve().parent / "data" / "logbook.txt"


class WordLSTM(nn.Module):
    def __init__(self, vocab, embedding, hidden, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, vocab)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens, state=None):
        out, state = self.lstm(self.drop(self.embedding(tokens)), state)
        return self.decoder(self.drop(out)), state


def stream(tokens, rank, world, batch_size, bptt):
    """Yield (input, target) forever: this rank's rows of the batchified book, `bptt` words at a time."""
    rows = tokens[: len(tokens) // (batch_size * world) * batch_size * world].view(batch_size * world, -1)
    rows = rows[rank * batch_size : (rank + 1) * batch_size]
    while True:
        for i in range(0, rows.shape[1] - bptt, bptt):
            yield rows[:, i : i + bptt], rows[:, i + 1 : i + 1 + bptt]


def train(rank, world, args):
    words = re.findall(r"\w+|[^\w\s]", TEXT.read_text().lower())
    vocab = {w: i for i, w in enumerate(sorted(set(words)))}
    tokens = torch.tensor([vocab[w] for w in words])

    torch.manual_seed(args.seed)
    net = WordLSTM(len(vocab), args.hidden, args.hidden)
    model = DistributedDataParallel(net)
    torch.manual_seed(args.seed * 1000 + rank)                # a different dropout mask on each rank
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    criterion = nn.CrossEntropyLoss()
    batches = stream(tokens, rank, world, args.batch_size, args.bptt)

    losses = []
    state = None
    model.train()
    for it in range(1, args.iters + 1):
        total = torch.zeros(())
        for micro in range(args.accumulate):
            inputs, targets = next(batches)
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits, state = model(inputs, state)
                loss = criterion(logits.flatten(0, 1), targets.flatten()) / args.accumulate
                loss.backward()
            state = tuple(s.detach() for s in state)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        dist.all_reduce(total)
        losses.append(total.item() / world)
        if rank == 0 and it % 5 == 0:
            print(f"iter {it} loss {losses[-1]:.4f} perplexity {math.exp(losses[-1]):.1f}", flush=True)

    if rank == 0:
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


def start(rank, world, store, args):
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


def launch(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:        # torchrun
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, args)
        return
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(start, (args.nprocs, os.path.join(tmp, "rendezvous"), args), nprocs=args.nprocs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--bptt", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of each rank")
    parser.add_argument("--lr", type=float, default=0.01)
    launch(parser.parse_args())
