"""A small pre-LN GPT and its data, for the parallel programs of this folder. Plain PyTorch: nothing here knows of ranks.

The fused query/key/value projection keeps the three rows blocks of one head together ([head, q|k|v, head_dim], as
Megatron does), so that cutting its output dimension in equal parts gives every tensor-parallel rank whole heads.
"""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Attention(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def split_heads(self, qkv):
        """[rows, time, heads · 3 · head_dim] → query, key, value, each [rows, heads, time, head_dim]."""
        per_head = qkv.unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2)
        return per_head.unbind(3)

    def attend(self, query, key, value):
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)

    def forward(self, x):
        context = self.attend(*self.split_heads(self.qkv(x)))
        return self.proj(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = dropout

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Embedding(nn.Module):
    def __init__(self, vocab, width, context, dropout=0.0):
        super().__init__()
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def positions(self, tokens):
        return torch.arange(tokens.shape[1])[None]

    def forward(self, tokens):
        return self.drop(self.word(tokens) + self.position(self.positions(tokens)))


class GPT(nn.Module):
    """The layers are held by their global index, so a pipeline stage that keeps some of them keeps their names."""

    def __init__(self, vocab, width, heads, layers, context, tied=False, recompute=False, dropout=0.0):
        super().__init__()
        self.recompute = recompute
        self.embedding = Embedding(vocab, width, context, dropout)
        self.layers = nn.ModuleDict({str(i): Block(width, heads, dropout) for i in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.embedding.word.weight

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


@torch.no_grad()
def initialise(model, layers):
    """Random values everywhere: with biases at zero and norms at one, a bias added twice or a lost norm has no effect."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.1)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)
        elif "embedding" in name:
            parameter.normal_(0.0, 0.2)
        else:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]))
        if name.endswith(("proj.weight", "fc2.weight")):
            parameter.div_(math.sqrt(2 * layers))


def build(args):
    """The whole model on one device, from the seed alone: every rank and the reference start from the same values."""
    torch.manual_seed(args.seed)
    model = GPT(args.vocab, args.width, args.heads, args.layers, args.context, args.tied, args.recompute, args.dropout)
    initialise(model, args.layers)
    return model.to(DTYPES[args.dtype])


def batches(args):
    """For every step the tokens of all ranks, [microbatches, rows, context + 1]: noisy arithmetic progressions mod vocab."""
    g = torch.Generator().manual_seed(1000 + args.seed)
    shape = (args.microbatches, args.rows, 1)
    for _ in range(args.steps):
        start = torch.randint(0, args.vocab, shape, generator=g)
        stride = torch.randint(1, 5, shape, generator=g)
        slips = torch.randint(0, 8, (*shape[:2], args.context + 1), generator=g).eq(0)
        yield (start + stride * torch.arange(args.context + 1) + slips) % args.vocab


def next_token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--microbatches", type=int, default=1, help="of one optimizer step")
    parser.add_argument("--rows", type=int, default=8, help="sequences of one microbatch, over all data-parallel ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-norm", type=float, default=0.5, help="of the gradient, before it is clipped")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0, help="of embeddings, attention and residuals")
    parser.add_argument("--tied", action="store_true", help="the head uses the weight of the word embedding")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every block")
