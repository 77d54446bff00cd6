"""Causal language model on data/alice.txt with the transformers Trainer and a tiny, randomly initialised GPT-2.

Accumulation of two micro-batches, clipping, cosine schedule with warmup, evaluation and a checkpoint in the middle
of the run, and the last checkpoint loaded back and compared. `--iters` counts optimizer steps.

Class: language
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch.utils.data import Dataset

try:
    import accelerate  # noqa: F401
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )
except ImportError as missing:
    print(f"hf_trainer_lm needs transformers and accelerate: {missing}", file=sys.stderr)
    sys.exit(77)

TEXT = Path(__file__).resolve().parents[1] / "data" / "alice.txt"


class TextBlocks(Dataset):
    """Consecutive blocks of characters; the Trainer shifts the labels itself."""

    def __init__(self, ids, block, stride):
        self.blocks = ids.unfold(0, block, stride)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        block = self.blocks[index]
        return {"input_ids": block, "attention_mask": torch.ones_like(block), "labels": block.clone()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of one micro-batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(args.seed)
    text = TEXT.read_text()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[c] for c in text])
    split = int(0.9 * len(ids))
    train_set, eval_set = TextBlocks(ids[:split], 48, 12), TextBlocks(ids[split:], 48, 48)

    config = GPT2Config(
        vocab_size=len(alphabet), n_positions=64, n_embd=args.width, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.05, embd_pdrop=0.05, attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as out:
        half = max(1, args.iters // 2)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=out, max_steps=args.iters, per_device_train_batch_size=args.batch_size,
                per_device_eval_batch_size=16, gradient_accumulation_steps=2, learning_rate=args.lr,
                lr_scheduler_type="cosine", warmup_steps=max(1, args.iters // 10), weight_decay=0.01, max_grad_norm=1.0,
                eval_strategy="steps", eval_steps=half, save_strategy="steps", save_steps=half, save_total_limit=1,
                logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=args.seed,
            ),
            train_dataset=train_set, eval_dataset=eval_set, data_collator=default_data_collator,
        )
        trainer.train()
        trainer.save_model(out)
        restored = GPT2LMHeadModel.from_pretrained(out)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), restored.state_dict().values()))
    print(f"checkpoint equals the model: {same}", flush=True)

    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "eval_losses": evaluated}), flush=True)


if __name__ == "__main__":
    main()
