"""Tensor parallelism: layers that are cut by hand, and plans of DTensor."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from . import Step, checkout, load, normal, numbers, program, stub, tokens, trained, who

WIDTH, INNER, CLASSES = 4, 8, 8


class Network(nn.Module):
    """Two layers and a head."""

    def __init__(self, up: nn.Module, down: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(WIDTH), up, down, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def plain() -> Network:
    return Network(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, CLASSES))


def train(model: nn.Module, loss: Any = F.cross_entropy) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    target = torch.randint(0, CLASSES, (4,), generator=torch.Generator().manual_seed(1))
    loss(model(numbers(4, WIDTH)), target).mean().backward()
    optimizer.step()


def alone() -> None:
    model = plain()
    normal(model)
    train(model)


@program("fairscale, column and row", "facebookresearch/fairscale", "tp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("facebookresearch/fairscale")
        from fairscale.nn.model_parallel import initialize, layers

        initialize.initialize_model_parallel(who()[1])
        try:
            model = Network(
                layers.ColumnParallelLinear(WIDTH, INNER, gather_output=False), layers.RowParallelLinear(INNER, WIDTH, input_is_parallel=True), layers.ColumnParallelLinear(WIDTH, CLASSES)
            )
            load(model, normal(plain()), *who())
            train(model)
        finally:
            initialize.destroy_model_parallel()

    return alone, parallel


class Words(nn.Module):
    """An embedding and a head over a vocabulary."""

    def __init__(self, words: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.words, self.norm, self.head = words, nn.LayerNorm(WIDTH), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(x)))  # type: ignore[no-any-return]


def plain_words() -> Words:
    return Words(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES))


def words_alone() -> None:
    model = plain_words()
    normal(model)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True), *tokens(2, 3, CLASSES))


@program("fairscale, vocabulary and its loss", "facebookresearch/fairscale", "tp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("facebookresearch/fairscale")
        from fairscale.nn.model_parallel import cross_entropy, initialize, layers

        initialize.initialize_model_parallel(who()[1])
        try:
            model = Words(layers.VocabParallelEmbedding(CLASSES, WIDTH), layers.ColumnParallelLinear(WIDTH, CLASSES, gather_output=False))
            load(model, normal(plain_words()), *who())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
            x, target = tokens(2, 3, CLASSES)
            cross_entropy.vocab_parallel_cross_entropy(model(x), target).mean().backward()
            optimizer.step()
        finally:
            initialize.destroy_model_parallel()

    return words_alone, parallel


class ByColumns(nn.Module):
    """Says of what comes in that ranks have columns of it, which is lost in an activation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias
        self.call = inner.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torchshard as ts

        ts.set_attribute(x, -1)
        return self.call(x)  # type: ignore[no-any-return]


@program("torchshard, column, row and its loss", "kaiyuyue/torchshard", "tp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("kaiyuyue/torchshard")
        stub("torch._six", inf=float("inf"), container_abcs=__import__("collections").abc, string_classes=(str,), int_classes=(int,))
        import torchshard as ts

        ts.distributed.init_process_group(who()[1])
        try:
            down = ts.nn.ParallelLinear(INNER, WIDTH, dim=0)
            model = Network(ts.nn.ParallelLinear(WIDTH, INNER, dim=1), nn.Sequential(ts.nn.RegisterParallelDim(-1), down), ts.nn.ParallelLinear(WIDTH, CLASSES, dim=1))
            model.down = ByColumns(down)
            load(model, normal(plain()), *who())
            train(model, lambda x, y: ts.nn.functional.parallel_cross_entropy(x, y))
        finally:
            ts.distributed.destroy_process_group()

    return alone, parallel


def pipegoose() -> Any:
    checkout("xrsrke/pipegoose")
    stub("transformers.utils.fx", symbolic_trace=None)
    from pipegoose.distributed.parallel_context import ParallelContext
    from pipegoose.distributed.parallel_mode import ParallelMode

    rank, world = who()

    class Context:
        """What its layers ask of a context, without its own making of process groups."""

        def get_world_size(self, mode: Any) -> int:
            return world if mode in (ParallelMode.TENSOR, ParallelMode.GLOBAL) else 1

        def get_local_rank(self, mode: Any) -> int:
            return rank if mode in (ParallelMode.TENSOR, ParallelMode.GLOBAL) else 0

        get_global_rank = lambda self: rank  # noqa: E731
        get_group = lambda self, mode: dist.group.WORLD  # noqa: E731
        get_ranks_in_group = lambda self, mode: list(range(world))  # noqa: E731
        is_initialized = lambda self, mode: True  # noqa: E731

    assert ParallelContext
    return Context()


@program("pipegoose, column and row", "xrsrke/pipegoose", "tp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        context = pipegoose()
        from pipegoose.nn.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

        model = Network(
            ColumnParallelLinear(WIDTH, INNER, gather_output=True, parallel_context=context), RowParallelLinear(INNER, WIDTH, parallel_context=context), ColumnParallelLinear(WIDTH, CLASSES, gather_output=True, parallel_context=context)
        )
        load(model, normal(plain()), *who())
        train(model)

    return alone, parallel


def nanotron(mode: str) -> tuple[Step, Step]:
    def parallel() -> None:
        import os

        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        checkout("huggingface/nanotron", "src")
        from nanotron.parallel.tensor_parallel import nn as layers
        from nanotron.parallel.tensor_parallel.enum import TensorParallelLinearMode

        how, (rank, world) = TensorParallelLinearMode[mode], who()
        group = dist.group.WORLD
        model = Network(
            layers.TensorParallelColumnLinear(WIDTH, INNER, group, how), layers.TensorParallelRowLinear(INNER, WIDTH, group, how, bias=False), layers.TensorParallelColumnLinear(WIDTH, CLASSES, group, how)
        )
        whole = nanotron_plain()
        load(model, normal(whole), rank, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, target = numbers(4, WIDTH), torch.randint(0, CLASSES, (4,), generator=torch.Generator().manual_seed(1))
        if mode == "REDUCE_SCATTER":  # rows are over ranks outside of the layers
            x = x.chunk(world)[rank]
        from nanotron.parallel.tensor_parallel.functional import sharded_cross_entropy

        sharded_cross_entropy(model(x), target, group).mean().backward()
        if mode == "REDUCE_SCATTER":
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()

    def single() -> None:
        model = nanotron_plain()
        normal(model)
        train(model)

    return single, parallel


def nanotron_plain() -> Network:
    return Network(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES))


program("nanotron, all-reduce", "huggingface/nanotron", "tp=2")(lambda: nanotron("ALL_REDUCE"))
program("nanotron, reduce-scatter", "huggingface/nanotron", "tp=2")(lambda: nanotron("REDUCE_SCATTER"))


@program("examples, tensor_parallel_example", "pytorch/examples", "tp=2")
def _() -> tuple[Step, Step]:
    def step() -> None:
        source = (checkout("pytorch/examples", "distributed/tensor_parallelism") / "tensor_parallel_example.py").read_text()
        namespace: dict[str, Any] = {"nn": nn, "torch": torch}
        start = source.index("class ToyModel")
        exec(compile(source[start : source.index('"""', source.index("def forward", start))], "tensor_parallel_example.py", "exec"), namespace)
        model = namespace["ToyModel"]()
        normal(model)
        if dist.is_initialized():
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            model = parallelize_module(model, init_device_mesh("cpu", (who()[1],)), {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
        model(numbers(4, 10)).sum().backward()
        optimizer.step()

    return step, step


def torch_testing(sequence: bool) -> Step:
    def step() -> None:
        from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

        torch.manual_seed(0)
        model = Transformer(ModelArgs(n_layers=1, vocab_size=8, max_seq_len=4, dim=8, n_heads=4, dropout_p=0.0))
        normal(model)
        if dist.is_initialized():
            from torch.distributed.device_mesh import init_device_mesh

            model = Transformer.parallelize(model, init_device_mesh("cpu", (who()[1],)), use_seq_parallel=sequence)
        trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), *tokens(2, 4, 8))

    return step


program("torch's tests, Transformer by DTensor", "pytorch/pytorch (torch.testing)", "tp=2")(lambda: torch_testing(False))
program("torch's tests, the same with sequence parallel", "pytorch/pytorch (torch.testing)", "tp=2")(lambda: torch_testing(True))


@program("examples, fsdp_tp_example", "pytorch/examples", "dp=2,tp=2")
def _() -> tuple[Step, Step]:
    def step() -> None:
        checkout("pytorch/examples", "distributed/tensor_parallelism")
        sys.modules.pop("model", None)
        llama = importlib.import_module("llama2_model")
        torch.manual_seed(0)
        model = llama.Transformer.from_model_args(llama.ModelArgs(dim=8, n_layers=1, n_heads=4, vocab_size=8, multiple_of=4, max_batch_size=4, max_seq_len=4))
        normal(model)
        x, target = tokens(4, 4, 8)
        if dist.is_initialized():
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor import Replicate, Shard
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                PrepareModuleInput,
                RowwiseParallel,
                SequenceParallel,
                parallelize_module,
            )

            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            tp = mesh["tp"]
            model = parallelize_module(
                model, tp,
                {"tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(), "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
            )
            for block in model.layers:
                plan = {
                    "attention_norm": SequenceParallel(), "attention": PrepareModuleInput(input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate())),
                    "attention.wq": ColwiseParallel(use_local_output=False), "attention.wk": ColwiseParallel(use_local_output=False), "attention.wv": ColwiseParallel(use_local_output=False),
                    "attention.wo": RowwiseParallel(output_layouts=Shard(1)), "ffn_norm": SequenceParallel(),
                    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)), "feed_forward.w1": ColwiseParallel(),
                    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)), "feed_forward.w3": ColwiseParallel(),
                }
                parallelize_module(block, tp, plan)
            model = fully_shard(model, mesh=mesh["dp"])
            x, target = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in (x, target))
        trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), x, target)

    return step, step
