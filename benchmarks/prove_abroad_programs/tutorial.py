"""The tutorial of picotron, part by part: tensor, data and pipeline parallelism by hand, for a small Llama."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

import torch
from torch.nn import functional as F

from . import Step, checkout, group_of_one, load, normal, program, stub, tokens, trained, who


class OnCpu:
    """Torch, for modules that ask for a GPU by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu")

    def zeros(self, *args: Any, **named: Any) -> torch.Tensor:
        return torch.zeros(*args, **{**named, "device": "cpu"})


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
    config = types.SimpleNamespace(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=12, vocab_size=8, num_hidden_layers=2, rms_norm_eps=1e-5, max_position_embeddings=4, rope_theta=500000.0)
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *a: None
    try:
        with group_of_one():
            sizes = {"dp": 1, "tp": 1, "pp": 1} | ({k: int(n) for k, n in (p.split("=") for p in mesh.split(","))} if who()[1] > 1 else {})
            groups = importlib.import_module("process_group_manager")
            groups.setup_process_group_manager(sizes["dp"], sizes["pp"], sizes["tp"])
            _picotron_step(config, groups.process_group_manager, train_step)
    finally:
        torch.cuda.synchronize = synchronize


def _picotron_step(config: Any, groups: Any, train_step: str) -> None:
    for name in ("model", "data_parallel"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name).torch = OnCpu()
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
