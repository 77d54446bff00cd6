"""Tensor parallelism: layers that are cut by hand, and plans of DTensor."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from . import Step, checkout, group_of_one, load, normal, numbers, program, stub, tokens, trained, who

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


@program("pipegoose, vocabulary and its loss", "xrsrke/pipegoose", "tp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        context = pipegoose()
        from pipegoose.nn.tensor_parallel.embedding import ParallelEmbedding
        from pipegoose.nn.tensor_parallel.linear import ColumnParallelLinear
        from pipegoose.nn.tensor_parallel.loss import _VocabParallelCrossEntropy

        model = Words(ParallelEmbedding(CLASSES, WIDTH, parallel_context=context), ColumnParallelLinear(WIDTH, CLASSES, parallel_context=context))
        load(model, normal(plain_words()), *who())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        x, target = tokens(2, 3, CLASSES)
        _VocabParallelCrossEntropy.apply(model(x), target, context).mean().backward()
        optimizer.step()

    return words_alone, parallel


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


def tutorial(part: str, mesh: str, train_step: str = "") -> tuple[Step, Step]:
    """picotron's tutorial: `part` is its folder."""

    def step() -> None:
        picotron(part, mesh, train_step)

    return step, step


def picotron(part: str, mesh: str, train_step: str) -> None:
    """One step of its model, by its own parallel code."""
    for name in ("model", "process_group_manager", "tensor_parallel", "data_parallel", "pipeline_parallel"):
        sys.modules.pop(name, None)
    folder = str(checkout("huggingface/picotron_tutorial", part))
    sys.path.remove(folder)
    sys.path.insert(0, folder)
    stub("flash_attn.flash_attn_interface", flash_attn_func=_attention)
    stub("flash_attn.layers.rotary", apply_rotary_emb=_rotary)
    stub("flash_attn.ops.triton.layer_norm", layer_norm_fn=lambda x, w, b, eps=1e-5, **named: F.rms_norm(x, (x.shape[-1],), w, eps))
    config = __import__("types").SimpleNamespace(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=12, vocab_size=8, num_hidden_layers=2, rms_norm_eps=1e-5, max_position_embeddings=4, rope_theta=500000.0)
    synchronize, device, empty, zeros = torch.cuda.synchronize, torch.device, torch.empty, torch.zeros
    torch.cuda.synchronize = lambda *a: None
    torch.device = lambda *a: device("cpu")  # type: ignore[assignment,misc]
    torch.zeros = lambda *a, **k: zeros(*a, **{**k, "device": "cpu"})  # type: ignore[assignment]
    try:
        with group_of_one():
            sizes = {"dp": 1, "tp": 1, "pp": 1} | ({k: int(n) for k, n in (p.split("=") for p in mesh.split(","))} if who()[1] > 1 else {})
            groups = importlib.import_module("process_group_manager")
            groups.setup_process_group_manager(sizes["dp"], sizes["pp"], sizes["tp"])
            _picotron_step(config, groups.process_group_manager, train_step)
    finally:
        torch.cuda.synchronize, torch.device, torch.empty, torch.zeros = synchronize, device, empty, zeros  # type: ignore[misc]


def _picotron_step(config: Any, groups: Any, train_step: str) -> None:
    whole = importlib.import_module("model").Llama(config=config)
    values = normal(whole)
    model = whole
    if groups.tp_world_size > 1:
        model = importlib.import_module("tensor_parallel").apply_tensor_parallel(model)
        load(model, values, groups.tp_rank, groups.tp_world_size)
    x, target = (t.chunk(groups.dp_world_size)[groups.global_rank // (groups.tp_world_size * groups.pp_world_size)] for t in tokens(4, 4, 8))
    if groups.pp_world_size > 1:
        pipeline = importlib.import_module("pipeline_parallel")
        model = pipeline.PipelineParallel(model, config)
    if train_step.startswith("Data") and groups.dp_world_size > 1:
        model = getattr(importlib.import_module("data_parallel"), train_step)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if groups.pp_world_size > 1:
        parts = 2

        class Loader:
            grad_acc_steps, at = parts, 0

            def __next__(self) -> dict[str, torch.Tensor]:
                k, self.at = self.at, self.at + 1
                return {"input_ids": x.chunk(parts)[k], "target_ids": target.chunk(parts)[k], "position_ids": torch.arange(4)}

        getattr(pipeline, train_step)(model, Loader(), (len(x) // parts, 4, config.hidden_size), "cpu", torch.float32)
        for parameter in model.parameters():
            parameter.grad /= parts
        optimizer.step()
    else:
        trained(model, optimizer, x, target)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, **named: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal).transpose(1, 2)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[: x.shape[1], None].float(), sin[: x.shape[1], None].float()
    return torch.cat([a * c - b * s, a * s + b * c], -1)


program("picotron tutorial, tensor parallel", "huggingface/picotron_tutorial", "tp=2")(lambda: tutorial("step4_tensor_parallel", "tp=2"))
program("picotron tutorial, data parallel", "huggingface/picotron_tutorial", "dp=2")(lambda: tutorial("step5_data_parallel_naive", "dp=2", "DataParallelNaive"))
program("picotron tutorial, buckets", "huggingface/picotron_tutorial", "dp=2")(lambda: tutorial("step6_data_parallel_bucket", "dp=2", "DataParallelBucket"))
program("picotron tutorial, all forwards first", "huggingface/picotron_tutorial", "pp=2")(lambda: tutorial("step7_pipeline_parallel_afab", "pp=2", "train_step_pipeline_afab"))
program("picotron tutorial, 1F1B", "huggingface/picotron_tutorial", "pp=2")(lambda: tutorial("step8_pipeline_parallel_1f1b", "pp=2", "train_step_pipeline_1f1b"))
