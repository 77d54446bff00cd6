"""transformers, accelerate and peft, under DDP, FSDP2 and tensor parallelism. Left out where they are not installed."""

from __future__ import annotations

import os
import tempfile

import accelerate
import peft
import torch
import torch.distributed as dist
import transformers as hf
from common import RANK, WORLD, Case, main, mine, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def noisy(model: nn.Module) -> nn.Module:
    """Weights that are not their usual ones: at one and nought mistakes hide."""
    torch.manual_seed(3)
    with torch.no_grad():
        for _name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def llama(**more) -> nn.Module:
    return noisy(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.1, **more)))


def gpt2() -> nn.Module:
    return noisy(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1)))


def bert() -> nn.Module:
    config = hf.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, initializer_range=0.1)
    return noisy(hf.BertForSequenceClassification(config))


def t5() -> nn.Module:
    return noisy(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, initializer_range=0.1, output_router_logits=False)
    return noisy(hf.MixtralForCausalLM(config))


def vit() -> nn.Module:
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_dropout_prob=0.0)
    return noisy(hf.ViTForImageClassification(config))


def batch(kind: str, row: torch.Tensor) -> dict[str, torch.Tensor]:
    if kind == "bert":
        mask = torch.ones_like(row)
        mask[:, -3:] = 0
        return {"input_ids": row, "attention_mask": mask, "labels": row[:, 0] % 3}
    if kind == "vit":
        return {"pixel_values": (row[:, :1] + torch.arange(64.0)).sin().view(-1, 1, 8, 8), "labels": row[:, 0] % 3}
    return {"input_ids": row, "labels": row}


def shared(kind: str, word: str) -> None:
    """A model of the library under DDP."""
    model = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "mixtral": mixtral, "vit": vit}[kind]()
    if word == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if word == "eager":
        model.set_attn_implementation("eager")
    if word == "mask_forgotten":
        model.register_forward_pre_hook(lambda m, a, k: (a, {n: v for n, v in k.items() if n != "attention_mask"}), with_kwargs=True)
    if word == "one_norm_without_gain":
        norm = next(m for m in model.modules() if "Norm" in type(m).__name__)
        norm.weight.requires_grad_(False)
    if word == "other_positions":
        model.register_forward_pre_hook(lambda m, a, k: (a, {**k, "position_ids": torch.arange(k["input_ids"].shape[1])[None] * 2}), with_kwargs=True)
    if word == "rope_of_rank":
        model.model.rotary_emb.attention_scaling = 1.1 if RANK else 1.0
    if word == "epsilon":
        model.model.layers[1].input_layernorm.variance_epsilon = 1e-2
    if word == "fewer_experts":
        for module in model.modules():
            if hasattr(module, "top_k"):
                module.top_k = 1
    model.train()
    unsynced = word == "without_ddp"
    wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "mixtral") if WORLD > 1 and not unsynced else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for row in tokens(2):
        optimizer.zero_grad()
        wrapped(**batch(kind, mine(row))).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def cut(word: str) -> None:
    """The library's own tensor-parallel plan."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = llama()
        if WORLD > 1:
            model.save_pretrained(folder)
            os.environ.setdefault("LOCAL_RANK", str(RANK))
            model = hf.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
            dist.barrier()
    if word == "output_bias":
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, a, out: out + 0.01)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        row = row.roll(RANK if word == "rows_by_rank" else 0, 0)
        model(input_ids=row, labels=row).loss.backward()
        if word == "norms_twice":
            for name, p in model.named_parameters():
                if "layernorm" in name:
                    p.grad *= 2
        optimizer.step()


def sharded(word: str) -> None:
    """FSDP2 of a library's model."""
    model = llama(tie_word_embeddings=word == "")
    if WORLD == 1:
        model = llama(tie_word_embeddings=True)
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        model(**batch("llama", mine(row))).loss.backward()
        optimizer.step()


def adapted(word: str) -> None:
    """LoRA by peft, under DDP."""
    torch.manual_seed(0)
    base = llama()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=8 if word == "alpha" else 4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if word == "bases_train":
        for name, p in model.named_parameters():
            if "q_proj.base_layer" in name:
                p.requires_grad_(True)
    wrapped = DistributedDataParallel(model) if WORLD > 1 and word != "without_ddp" else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for row in tokens(2):
        optimizer.zero_grad()
        wrapped(**batch("llama", mine(row))).loss.backward()
        optimizer.step()


def accelerated(word: str) -> None:
    """An `Accelerator`'s loop, with accumulation."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    parts = 2 if WORLD > 1 and word != "at_once" else 1
    runner = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if WORLD > 1:
        model, optimizer = runner.prepare(model, optimizer)
    for row in tokens(2):
        for part in mine(row).chunk(parts):
            with runner.accumulate(model):
                loss = model(**batch("gpt2", part)).loss
                if word == "divided_twice":
                    loss = loss / parts
                if word == "plain_backward":
                    loss.backward()
                else:
                    runner.backward(loss)
                if runner.sync_gradients and word != "clipping_forgotten":
                    runner.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = next(tokens(1, rows=32))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class InOrder(hf.Trainer):
    """Takes rows as they come: each update the same eight."""

    def get_train_dataloader(self):
        rows = [Rows()[i] for i in range(32)]
        size = 8 // WORLD // self.args.gradient_accumulation_steps
        groups = [rows[i : i + 8] for i in range(0, 32, 8)]
        own = [r for group in groups for r in group[RANK * 8 // WORLD : (RANK + 1) * 8 // WORLD]]
        return torch.utils.data.DataLoader(own, batch_size=size, shuffle=False)


def trainer(word: str) -> None:
    """The library's Trainer."""
    model = gpt2()
    parts = 2 if WORLD > 1 and word != "at_once" else 1
    with tempfile.TemporaryDirectory() as folder:
        more = {"learning_rate": 2e-3 if word == "rate" else 1e-3, "max_grad_norm": 10.0 if word == "no_clipping" else 0.2, "weight_decay": 0.0 if word == "decay" else 0.1}
        arguments = hf.TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=8 // WORLD // parts, gradient_accumulation_steps=parts, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", lr_scheduler_type="constant", ddp_find_unused_parameters=False, disable_tqdm=True, average_tokens_across_devices=word != "tokens_by_rank", **more,
        )  # fmt: skip
        InOrder(model=model, args=arguments).train()


WHERE = r".*layers\.1\.input_layernorm.*"
CASES = {
    "llama": Case(lambda w: shared("llama", w), ("", "recomputed", "eager"), {"without_ddp": "gradient:", "one_norm_without_gain": r"(model|gradient):model\.layers\.0\.input_layernorm", "other_positions": r"forward:(model|model\.rotary_emb|)", "rope_of_rank": r"forward:model\.rotary_emb", "epsilon": r"forward:model\.layers\.1\.input_layernorm"}),
    "gpt2": Case(lambda w: shared("gpt2", w), ("", "recomputed"), {"without_ddp": "gradient:", "other_positions": r"forward:(transformer|transformer\.wpe|)"}),
    "bert": Case(lambda w: shared("bert", w), ("", "eager"), {"mask_forgotten": "forward:(bert|)"}),
    "t5": Case(lambda w: shared("t5", w), ("",), {"without_ddp": "gradient:"}),
    "mixtral": Case(lambda w: shared("mixtral", w), ("", "recomputed"), {"without_ddp": "gradient:", "fewer_experts": r"forward:model\.layers\.0\.mlp(\.gate)?"}),
    "vit": Case(lambda w: shared("vit", w), ("", "eager"), {"without_ddp": "gradient:"}),
    "cut": Case(cut, ("",), {"output_bias": r"forward:model\.layers\.0\.mlp(\.down_proj)?", "rows_by_rank": r"forward:(model|model\.embed_tokens|)", "norms_twice": r"gradient:model\.layers\.[01]\.\w*layernorm"}),
    "sharded": Case(sharded, ("",), {"untied": r"(model|gradient|forward):(model\.embed_tokens|lm_head)"}),
    "adapted": Case(adapted, ("",), {"alpha": r"forward:.*layers\.0\.self_attn\.[qv]_proj", "bases_train": r"(gradient|update):.*layers\.[01]\.self_attn\.q_proj(\.base_layer)?", "without_ddp": "gradient:"}),
    "accelerated": Case(accelerated, ("", "at_once"), {"divided_twice": "(backward|gradient):", "plain_backward": "(backward|gradient):", "clipping_forgotten": "gradient:"}),
    "trainer": Case(trainer, ("", "at_once"), {"rate": "update:", "no_clipping": "gradient:", "decay": "update:"}),
}
if __name__ == "__main__":
    main(CASES)
