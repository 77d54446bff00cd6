"""Plans that nobody wrote, of small language models of transformers: does one step on threads give what one device computes?

    python benchmarks/parallel_derived.py [NAME…] [--mesh dp=2,tp=2] [--json FILE]

Two sources each: the table `base_model_tp_plan` of the configuration, and one forward (`model`). Columns: what came out, the share of the
parameters that tensor parallelism cuts, CPU seconds, and what the plan leaves whole or computes otherwise. Attention drops a tenth. Models are
made from configurations of width 32; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.deriving import derive

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "use_cache": False, "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OF_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {"head_dim": 8}, "Phi3": {}, "Gemma": {"head_dim": 8}, "Gemma2": {"head_dim": 8}, "Olmo": {}, "Olmo2": {},
    "Olmo3": {}, "Cohere": {}, "Glm": {"head_dim": 8}, "Glm4": {"head_dim": 8}, "Granite": {}, "Starcoder2": {}, "GPTNeoX": {"rotary_pct": 1.0}, "Phi": {},
    "Helium": {"head_dim": 8}, "SmolLM3": {}, "Ernie4_5": {}, "SeedOss": {"head_dim": 8}, "Arcee": {"head_dim": 8}, "Apertus": {}, "StableLm": {}, "Persimmon": {},
    "Mixtral": {"num_local_experts": 4}, "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32}, "Qwen3Moe": {**EXPERTS, "head_dim": 8}, "Olmoe": EXPERTS,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "Phimoe": {},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "GPT2": OF_GPT, "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "GPTJ": OF_GPT, "Bloom": {"n_layer": 2, "n_head": 4}, "GPTBigCode": OF_GPT, "Falcon": {},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, "CodeGen": OF_GPT,
    "XGLM": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}, "BioGpt": {},
}  # fmt: skip


def model_of(name: str) -> torch.nn.Module:
    """A small model, with values."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    made: torch.nn.Module = kind(config)
    return made


def looked(name: str, source: str, mesh: str) -> dict[str, Any]:
    """One row of the table."""
    model = model_of(name)
    tokens = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    start = time.process_time()
    try:
        found = derive(model, {"input_ids": tokens, "labels": tokens}, mesh, source=source)
    except OracleError as error:
        return {"name": name, "source": source, "outcome": "no table" if "base_model_tp_plan" in error.message else "refused", "said": [error.message]}
    layouts = {parameter: found.plan.param_layout(key) for key, parameter in model.named_parameters()}
    cut = sum(p.numel() for p, layout in layouts.items() if layout is not None and layout.cuts)
    return {
        "name": name, "source": source, "outcome": "differs" if found.apart else "equal", "cut": cut / sum(p.numel() for p in layouts),
        "seconds": time.process_time() - start, "said": [*found.apart[:2], *found.notes],
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in args.names or MODELS:
        for source in ("tp_plan", "model"):
            row = looked(name, source, args.mesh)
            rows.append(row)
            said = "; ".join(row["said"])[:160] if row["outcome"] != "no table" else ""
            print(f"{name:12} {source:8} {row['outcome']:9} {row.get('cut', 0.0):5.2f} {row.get('seconds', 0.0):5.1f} s  {said}", flush=True)
    for source in ("tp_plan", "model"):
        outcomes = [row["outcome"] for row in rows if row["source"] == source]
        print(f"{source}: {', '.join(f'{outcomes.count(kind)} {kind}' for kind in ('equal', 'differs', 'refused', 'no table'))}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
