"""Language model on data/rhymes.txt with DeepSpeed's ZeRO, stage 1, on one rank: bfloat16 weights, float32 masters, and a scheduler of torch that the engine steps.

Class: language
"""
import argparse
import json
import os
import sys
from pathlib import Path

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
    os.environ.setdefault(name, value)
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    import deepspeed
except ImportError as missing:
    print(f"deepspeed_zero_lm needs deepspeed: {missing}", file=sys.stderr)
    sys.exit(77)

TEXT = Path(__file__).resolve().parents[1] / "data" / "rhymes.txt"


class Reader(nn.Module):
    def __init__(self, letters, width):
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(letters, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, letters)

    def forward(self, ids, targets):
        states, _ = self.cell(self.embedding(ids))
        return F.cross_entropy(self.out(states).flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = TEXT.read_text()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    blocks = torch.tensor([alphabet[c] for c in text]).unfold(0, 33, 16)
    data = TensorDataset(blocks[:, :-1].clone(), blocks[:, 1:].clone())
    model = Reader(len(alphabet), args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 5))
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    losses = []
    while len(losses) < args.iters:
        for ids, targets in DataLoader(data, args.batch_size, shuffle=True, drop_last=True):
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
