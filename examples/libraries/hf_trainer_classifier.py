"""Sentence classification with the transformers Trainer and a tiny BERT: is a customer pleased or angry?

compute_metrics, label smoothing, weight decay, evaluation and checkpoint every few steps, an early-stopping
callback that does not fire, and `load_best_model_at_end`: the weights jump back to an earlier checkpoint after the
last step.

Class: language
"""
import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch

try:
    import accelerate  # noqa: F401
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
        set_seed,
    )
except ImportError as missing:
    print(f"hf_trainer_classifier needs transformers and accelerate: {missing}", file=sys.stderr)
    sys.exit(77)

WORDS = {
    1: ["hate", "awful", "worst", "broken", "never", "late", "rude"],
    0: ["love", "lovely", "best", "kind", "always", "prompt", "thanks"],
}
FILLER = ["the", "parcel", "came", "and", "it", "was", "with", "a", "note", "from", "them", "today"]
VOCAB = {word: i for i, word in enumerate(["[PAD]", "[CLS]", *FILLER, *WORDS[0], *WORDS[1]])}


def reviews(count, rng):
    """(ids, label) pairs: filler words with three words of one mood and at most one of the other."""
    rows = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(FILLER, k=rng.randint(4, 10)) + rng.choices(WORDS[label], k=3)
        words += rng.choices(WORDS[1 - label], k=rng.randint(0, 1))
        rng.shuffle(words)
        rows.append({"input_ids": [VOCAB["[CLS]"], *(VOCAB[w] for w in words)], "label": label})
    return rows


@dataclass
class PadCollator:
    """Pads a batch to its longest row."""

    pad: int = 0

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [self.pad] * (width - len(row["input_ids"])) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (ids != self.pad).long(),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(args.seed)
    rng = random.Random(args.seed)
    train_set, eval_set = reviews(480, rng), reviews(96, rng)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(VOCAB), hidden_size=args.hidden, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * args.hidden, max_position_embeddings=32, num_labels=2, initializer_range=0.1,
    ))
    every = max(1, args.iters // 4)
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=out, max_steps=args.iters, per_device_train_batch_size=args.batch_size,
                per_device_eval_batch_size=32, learning_rate=args.lr, weight_decay=0.05, label_smoothing_factor=0.1,
                lr_scheduler_type="linear", warmup_steps=2, eval_strategy="steps", eval_steps=every,
                save_strategy="steps", save_steps=every, load_best_model_at_end=True, metric_for_best_model="accuracy",
                greater_is_better=True, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=args.seed,
            ),
            train_dataset=train_set, eval_dataset=eval_set, data_collator=PadCollator(),
            compute_metrics=compute_metrics, callbacks=[EarlyStoppingCallback(early_stopping_patience=10)],
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
