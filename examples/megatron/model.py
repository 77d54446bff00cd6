"""A small GPT of Megatron-core's own modules, and parameters that are the same however the model is cut.

Shapes in this file: s tokens of a sequence, b sequences, n heads, d size of a head; Megatron's order is [s, b, ...].
"""
import hashlib
import math

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class Norm:
    """torch's norm with the mark by which Megatron adds up its gradients under sequence parallelism.

    Megatron's own wrapper of it (`WrappedTorchNorm`) refuses sequence parallelism. A class, since Megatron takes a function
    for something to call in the forward pass.
    """

    def __new__(cls, config, hidden_size, eps=1e-5):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


def sequence_chunks(length, size, rank):
    """Which tokens a context parallel rank holds: chunks `rank` and `2 size - 1 - rank` of 2 `size` equal ones."""
    chunk = length // (2 * size)
    first, last = rank * chunk, (2 * size - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


class ContextParallelAttention(torch.nn.Module):
    """Causal attention over all keys and values of the context parallel group; Megatron's local one knows no such group."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection=None, **kwargs):
        super().__init__()
        self.layer_number = layer_number
        self.group = pg_collection.cp

    def forward(self, query, key, value, attention_mask, **kwargs):
        size, rank = self.group.size(), self.group.rank()
        s, b, n, d = query.shape
        key, value = (gather_from_sequence_parallel_region(t, True, self.group) for t in (key, value))
        if key.shape[2] < n:
            key, value = (t.repeat_interleave(n // t.shape[2], dim=2) for t in (key, value))
        mine = sequence_chunks(s * size, size, rank)
        theirs = torch.cat([sequence_chunks(s * size, size, other) for other in range(size)])
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(d)
        scores = scores.masked_fill(theirs[None, :] > mine[:, None], -10_000.0)
        weights = scores.float().softmax(-1).to(value.dtype)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).reshape(s, b, n * d)


def make_config(args):
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_query_groups=args.groups or args.heads,
        ffn_hidden_size=4 * args.hidden,
        normalization=args.norm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not args.experts,      # experts with bias fail on torch 2.13 (in-place on a view)
        num_moe_experts=args.experts or None,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss" if args.balance else "none",
        moe_aux_loss_coeff=args.balance,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp or args.tp,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
        bf16=args.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        overlap_p2p_comm=args.vpp > 1,
        batch_p2p_comm=args.vpp <= 1,
        # Kernels that are not on a CPU.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def make_spec(config, vp_stage):
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    layers = [layer] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def make_chunks(args, config):
    """The parts of the model that live on this pipeline stage: one, or one for each virtual stage."""
    chunks = []
    for stage in range(args.vpp):
        vp_stage = stage if args.vpp > 1 else None
        chunk = GPTModel(
            config,
            make_spec(config, vp_stage),
            vocab_size=args.vocab,
            max_sequence_length=args.length,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=args.tied,
            vp_stage=vp_stage,
        )
        set_parameters(chunk, args.seed)
        chunks.append(Float16Module(config, chunk) if args.dtype == "bf16" else chunk)
    return chunks


def whole_name(chunk, name):
    """Name of a parameter in the model that is not cut: layers and experts counted over all stages and ranks."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.get_submodule(".".join(parts[:3])).layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        owner = chunk.get_submodule(name.split(".local_experts")[0])
        parts[at] = str(int(parts[at]) + owner.num_local_experts * mpu.get_expert_model_parallel_rank())
    if parts[0] == "output_layer" and chunk.share_embeddings_and_output_weights:
        parts = ["embedding", "word_embeddings", "weight"]
    return ".".join(parts)


def set_parameters(chunk, seed):
    """Fill every parameter with the part it holds of a whole tensor, which is random by its name."""
    for name, parameter in chunk.named_parameters():
        whole = whole_name(chunk, name)
        if "local_experts" in whole:
            size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
        else:
            size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        cut = getattr(parameter, "tensor_model_parallel", False)
        dim, stride = (parameter.partition_dim, parameter.partition_stride) if cut else (0, 1)
        shape = list(parameter.shape)
        shape[dim] *= size if cut else 1
        generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed}/{whole}".encode()).hexdigest()[:15], 16))
        values = torch.randn(shape, generator=generator)
        if "norm" in whole and whole.endswith("weight"):
            values = 1 + 0.1 * values
        else:
            values = values * (0.05 if values.dim() == 1 else 1 / math.sqrt(shape[-1]))
        if cut:  # fused tensors (gate and up) are cut within each of their `stride` parts
            values = torch.cat([part.chunk(size, dim)[rank] for part in values.chunk(stride, dim)], dim)
        with torch.no_grad():
            parameter.copy_(values)
