"""Correct programs that others wrote: what is said of them? None may be DIFFERENT.

    python benchmarks/prove_others.py [--only NAME …] [--proof S]
    proctor oracle prove --reference "python benchmarks/prove_others.py --train 'mixtral, FSDP2'" \
        --candidate "torchrun --nproc-per-node 2 benchmarks/prove_others.py --train 'mixtral, FSDP2'"

Models of transformers, tiny and from their configurations (nothing is downloaded), trained by one step alone and in parallel on a fake
process group: Llama, GPT-2 and Mixtral by DistributedDataParallel's, FSDP2's and DTensor's own code, Llama also by the plan that
transformers ships for it. `--train` is one such step as a command, with real ranks by torchrun. A row: program, verdict, seconds of CPU, and what stayed opaque.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS, TOKENS, VOCABULARY = 4, 4, 8


def llama() -> nn.Module:
    """Grouped-query attention, RMS norm, rotary positions, SwiGLU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=TOKENS, attn_implementation="eager",
        )
    )


def gpt2() -> nn.Module:
    """Learned positions, layer norm, gelu, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    )


def mixtral() -> nn.Module:
    """Two of four experts a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=TOKENS, attn_implementation="eager", pad_token_id=None,
        )
    )


def data_parallel(model: nn.Module) -> nn.Module:
    """By torch's wrapper."""
    return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def fully_sharded(model: nn.Module) -> nn.Module:
    """FSDP2, a unit a layer."""
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for layer in layers(model):
            fully_shard(layer)
        fully_shard(model)
    return model


def layers(model: nn.Module) -> Any:
    """The list of blocks."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: sum(p.numel() for p in m.parameters()))


def by_its_plan(model: nn.Module) -> nn.Module:
    """Tensor parallel by the plan of the model's own configuration, as DTensor's styles."""
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan: dict[str, Any] = {f"model.{name}": styles[style]() for name, style in model.config.base_model_tp_plan.items() if style in styles}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


def step(make: Callable[[], nn.Module], parallel: Callable[[nn.Module], nn.Module], rows: bool) -> Callable[[], None]:
    """A training step; `rows`: the batch is cut over ranks."""

    def train() -> None:
        torch.manual_seed(0)
        made = make()
        for parameter in made.parameters():
            if parameter.ndim == 1:  # at its usual value of 0 or 1, what is lost of it has no effect
                nn.init.normal_(parameter, 1.0, 0.1)
        model = parallel(made.train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
        if rows and dist.is_initialized():
            tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return train


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], str]] = {
    "llama, its plan": (llama, by_its_plan, "tp=2"),
    "llama, DDP": (llama, data_parallel, "dp=2"),
    "llama, FSDP2": (llama, fully_sharded, "dp=2"),
    "gpt2, DDP": (gpt2, data_parallel, "dp=2"),
    "gpt2, FSDP2": (gpt2, fully_sharded, "dp=2"),
    "mixtral, DDP": (mixtral, data_parallel, "dp=2"),
    "mixtral, FSDP2": (mixtral, fully_sharded, "dp=2"),
}


def main() -> None:
    """See the module."""
    from proctor.errors import OracleError
    from proctor.oracle.prove import prove

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--proof", type=float, default=120.0, metavar="S")
    parser.add_argument("--train", choices=PROGRAMS, metavar="NAME", help="train one step of it, as a rank of torchrun's or alone, and judge nothing")
    args = parser.parse_args()
    if args.train:
        make, parallel, mesh = PROGRAMS[args.train]
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
        return step(make, parallel, mesh.startswith("dp"))()
    warnings.simplefilter("ignore")
    for name, (make, parallel, mesh) in PROGRAMS.items():
        if args.only and name not in args.only:
            continue
        began, train = time.process_time(), step(make, parallel, mesh.startswith("dp"))
        try:
            verdict = prove(train, train, mesh, proof_s=args.proof)
            row = {"program": name, "verdict": verdict.verdict, "why": verdict.why, "where": verdict.culprit.said if verdict.culprit else "", "opaque": verdict.opaque}
        except OracleError as error:
            row = {"program": name, "verdict": "error", "why": str(error)}
        print(json.dumps({**row, "cpu_s": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
