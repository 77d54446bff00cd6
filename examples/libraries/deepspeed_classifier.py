"""Classifier of two moons with DeepSpeed on one rank: the engine accumulates over two batches, clips and warms up by its configuration; a checkpoint in the middle is loaded in the end.

Class: tabular
"""
import argparse
import json
import os
import sys
import tempfile

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
    os.environ.setdefault(name, value)
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    import deepspeed
except ImportError as missing:
    print(f"deepspeed_classifier needs deepspeed: {missing}", file=sys.stderr)
    sys.exit(77)


def moons(count, seed):
    g = torch.Generator().manual_seed(seed)
    side, angle = torch.randint(2, (count,), generator=g), 3.1416 * torch.rand(count, generator=g)
    x = torch.stack([angle.cos() + side, angle.sin() * (1 - 2.0 * side) + 0.4 * side], 1)
    return TensorDataset(x + 0.1 * torch.randn(count, 2, generator=g), side)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24, help="updates, each over two batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(2, args.hidden), nn.Tanh(), nn.Dropout(0.05), nn.Linear(args.hidden, args.hidden), nn.Tanh(), nn.Linear(args.hidden, 2))
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": args.lr, "warmup_num_steps": 5, "warmup_type": "linear"}},
    }
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    test = moons(128, args.seed + 7)

    def evaluate():
        engine.eval()
        with torch.no_grad():
            x, y = test.tensors
            found = (engine(x).argmax(1) == y).float().mean().item()
        engine.train()
        return found

    losses, micro = [], []
    with tempfile.TemporaryDirectory() as folder:
        engine.train()
        while len(losses) < args.iters:
            for x, y in DataLoader(moons(512, args.seed), args.batch_size, shuffle=True, drop_last=True):
                loss = F.cross_entropy(engine(x), y)
                engine.backward(loss)
                engine.step()
                micro.append(loss.item())
                if len(micro) < 2:
                    continue
                losses.append(sum(micro) / 2)
                micro = []
                if len(losses) % 10 == 0:
                    print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                if len(losses) == max(1, args.iters // 2):
                    engine.save_checkpoint(folder, tag="half")
                if len(losses) == args.iters:
                    break
        last = evaluate()
        param_sum = sum(p.detach().double().abs().sum().item() for p in net.parameters())
        engine.load_checkpoint(folder, tag="half")
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": last, "half": evaluate()}), flush=True)


if __name__ == "__main__":
    main()
