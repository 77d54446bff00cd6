"""Adapt a frozen language model to a new text with low-rank adapters (LoRA).

A small GPT-like base is trained for a few steps on data/logbook.txt, then every base weight, the output head included, is
frozen and LoRA matrices in the attention and feed-forward layers are trained on data/rhymes.txt. AdamW over the adapters
only, warmup by SequentialLR, accumulation of two micro-batches, adapter-only checkpoint, and a merged copy that must
agree with the adapted model. `--iters` counts the adapter's steps.

Class: language
"""
import argparse
import copy
import io
import json
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

DATA = Path(__file__).resolve().parent / "data"


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank update, y = W x + scale * B A x."""

    def __init__(self, base, rank, alpha, dropout=0.05):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B)

    @torch.no_grad()
    def merge(self):
        merged = copy.deepcopy(self.base)
        merged.weight += self.scale * self.lora_B @ self.lora_A
        return merged


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 3 * dim)
        self.fc2 = nn.Linear(3 * dim, dim)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class BaseLM(nn.Module):
    def __init__(self, vocab, dim, heads, depth, context):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.lm_head(self.norm(h))


def add_lora(model, rank, alpha, targets=("qkv", "proj", "fc1", "fc2")):
    for p in model.parameters():
        p.requires_grad = False
    for layer in model.layers:
        for name in targets:
            setattr(layer, name, LoRALinear(getattr(layer, name), rank, alpha))
    return model


def merge_lora(model):
    merged = copy.deepcopy(model)
    for layer in merged.layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, LoRALinear):
                setattr(layer, name, module.merge())
    return merged


def lora_state_dict(model):
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


def sample(tokens, batch_size, context):
    starts = torch.randint(0, len(tokens) - context - 1, (batch_size, 1))
    rows = tokens[starts + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def lm_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def pretrain(model, tokens, steps, batch_size, context):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for step in range(1, steps + 1):
        loss = lm_loss(model, *sample(tokens, batch_size, context))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"base step {step} loss {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48, help="model dimension, a multiple of --heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=8.0)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=12, help="rows of one micro-batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--pretrain-iters", type=int, default=60)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    old, new = (DATA / "logbook.txt").read_text(), (DATA / "rhymes.txt").read_text()
    index = {c: i for i, c in enumerate(sorted(set(old + new)))}
    old, new = (torch.tensor([index[c] for c in text]) for text in (old, new))

    model = BaseLM(len(index), args.width, args.heads, 2, args.context)
    pretrain(model, old, args.pretrain_iters, args.batch_size, args.context)

    model = add_lora(model, args.rank, args.alpha)
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable {sum(p.numel() for p in trainable)} of {total}", flush=True)
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.0)
    scheduler = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=5), ConstantLR(optimizer, factor=1.0)], milestones=[5]
    )

    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        optimizer.zero_grad()
        running = 0.0
        for _ in range(2):
            loss = lm_loss(model, *sample(new, args.batch_size, args.context)) / 2
            loss.backward()
            running += loss.item()
        optimizer.step()
        scheduler.step()
        losses.append(running)
        if it % 10 == 0:
            print(f"iter {it} loss {running:.4f}", flush=True)

    buffer = io.BytesIO()
    torch.save(lora_state_dict(model), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True), strict=False)
    model.eval()
    x, _ = sample(new, 16, args.context)
    with torch.no_grad():
        difference = (model(x) - merge_lora(model).eval()(x)).abs().max().item()
    print(f"adapter checkpoint {buffer.getbuffer().nbytes} bytes; merged model differs by {difference:.1e}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
