"""A small Llama of plain torch, and programs that make it parallel by torch's own means."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.n_heads, self.head_dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        rows, time, _ = x.shape
        q, k, v = (w(x).view(rows, time, self.n_heads, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.wo(out.transpose(1, 2).reshape(rows, time, -1))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, tokens=64, width=32, heads=4, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def make():
    torch.manual_seed(0)
    return Llama()


def batch():
    return torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(0))


def tensor_parallel(model, mesh, output=Replicate()):  # noqa: B008  # a placement is a constant
    tp = mesh["tp"]
    for block in model.layers:
        parallelize_module(block, tp, {"attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel()})
        parallelize_module(block.feed_forward, tp, {"w[13]": ColwiseParallel(), "w2": RowwiseParallel()})
    parallelize_module(model, tp, {"output": ColwiseParallel(output_layouts=output)})


def sequence_parallel(model, mesh):
    tp, parts, whole = mesh["tp"], (Shard(1),), (Replicate(),)
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, ends)
    for block in model.layers:
        styles = {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole),
            "feed_forward": PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole),
            "attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w[13]": ColwiseParallel(), "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(block, tp, styles)
        block.attention.n_heads //= tp.size()
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def distributed_tensors(model, mesh):
    cuts = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
    for path, module in list(model.named_modules()):
        dim = cuts.get(path.rpartition(".")[2])
        if dim is not None:
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh["tp"], [Shard(dim)]))


def forgotten_gather(model, mesh):
    tensor_parallel(model, mesh, Shard(-1))
