"""Tensor-parallel transformer classifier with DTensor (`parallelize_module`) on a one-dimensional device mesh.

Attention and feed-forward layers are split column-wise then row-wise; embedding, LayerNorms and the head stay
replicated. Every rank reads the same batch. The task: say which of the bracket kinds is unbalanced in a string.
Adam, no scheduler, zero_grad at the start. Runs alone or under torchrun.

Class: language
"""
import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Attention(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape                # local heads: the last dimension is dim / tp here
        q, k, v = (f(x).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(F.relu(self.w1(x)))


class Layer(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, head_dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Classifier(nn.Module):
    def __init__(self, vocab, length, dim, head_dim, layers, classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.randn(length, dim) * 0.1)
        self.layers = nn.ModuleList([Layer(dim, head_dim) for _ in range(layers)])
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}


def brackets(count, length, g):
    """Strings over ( ) [ ] { } .; class 0..2: that kind has one more opening than closing bracket."""
    labels = torch.randint(0, 3, (count,), generator=g)
    rows = torch.full((count, length), 6)
    for row, label in zip(rows, labels.tolist()):
        pairs = torch.randint(0, 3, (length // 2 - 2,), generator=g)
        symbols = torch.cat([2 * pairs, 2 * pairs + 1, torch.tensor([2 * label])])
        row[torch.randperm(length, generator=g)[: len(symbols)]] = symbols
    return rows, labels


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank, world, args):
    torch.manual_seed(args.seed)
    length = 14
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = Classifier(7, length, args.width, args.head_dim, args.layers, 3)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    g = torch.Generator().manual_seed(args.seed)
    test_tokens, test_labels = brackets(200, length, torch.Generator().manual_seed(args.seed + 1))
    losses = []
    for it in range(1, args.iters + 1):
        tokens, labels = brackets(args.batch_size, length, g)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and it % 5 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_tokens).argmax(1) == test_labels).float().mean().item()
    param_sum = sum(full(p.detach()).double().abs().sum().item() for p in model.parameters())
    if rank == 0:
        print(f"test accuracy {accuracy:.3f}", flush=True)
        print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


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
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="a multiple of head-dim × nprocs")
    parser.add_argument("--head-dim", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    launch(parser.parse_args())
