"""Token tagging with the transformers Trainer on two CPU ranks (gloo): mark the letters inside quotation marks.

The Trainer sees the launcher's variables, wraps the model in DDP and shards the loader. A tiny DistilBERT, linear
warmup, evaluation gathered over the ranks. Runs as `python hf_trainer_ddp.py` (starts itself under
`torch.distributed.run`) or under torchrun.

Class: language
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch.utils.data import TensorDataset

try:
    import accelerate  # noqa: F401
    from transformers import (
        DistilBertConfig,
        DistilBertForTokenClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )
except ImportError as missing:
    print(f"hf_trainer_ddp needs transformers and accelerate: {missing}", file=sys.stderr)
    sys.exit(77)

QUOTE, LETTERS, LENGTH = 1, 20, 24


def quoted(count, seed):
    """Rows of letters with one quoted span; a letter's label says whether it stands inside."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 2 + LETTERS, (count, LENGTH), generator=g)
    start = torch.randint(0, LENGTH // 2, (count, 1), generator=g)
    end = start + torch.randint(3, LENGTH // 2, (count, 1), generator=g)
    place = torch.arange(LENGTH)
    ids = ids.where((place != start) & (place != end), QUOTE)
    return TensorDataset(ids, ((place > start) & (place < end)).long())


def collate(rows):
    ids, labels = (torch.stack(column) for column in zip(*rows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs and state.global_step % 10 == 0:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def train(args):
    torch.set_num_threads(1)
    set_seed(args.seed)
    model = DistilBertForTokenClassification(DistilBertConfig(
        vocab_size=2 + LETTERS, max_position_embeddings=LENGTH, dim=args.dim, hidden_dim=2 * args.dim, n_layers=2, n_heads=4,
        num_labels=2, initializer_range=0.1,
    ))
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=out, max_steps=args.iters, per_device_train_batch_size=args.batch_size, learning_rate=args.lr,
                per_device_eval_batch_size=16, lr_scheduler_type="linear", warmup_steps=2, save_strategy="no",
                logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=args.seed, ddp_backend="gloo",
                ddp_find_unused_parameters=False, average_tokens_across_devices=False,
            ),
            train_dataset=quoted(640, args.seed), eval_dataset=quoted(80, args.seed + 1), data_collator=collate,
            callbacks=[Print()],
        )
        trainer.train()
        scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        result = {"losses": losses, "param_sum": param_sum, "eval_loss": scores["eval_loss"]}
        print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.nprocs}"]
        sys.exit(subprocess.run([*torchrun, __file__, *sys.argv[1:]], check=False).returncode)
