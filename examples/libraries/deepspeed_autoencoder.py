"""Autoencoder of noisy waves with DeepSpeed's ZeRO, stage 2, on one rank: two losses of a batch, three batches an update, evaluated between epochs.

Class: signal
"""
import argparse
import json
import os
import sys

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
    os.environ.setdefault(name, value)
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    import deepspeed
except ImportError as missing:
    print(f"deepspeed_autoencoder needs deepspeed: {missing}", file=sys.stderr)
    sys.exit(77)


class Coder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, 4))
        self.decoder = nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, 48))
        self.pitch = nn.Linear(4, 1)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), self.pitch(code)


def waves(count, seed):
    g = torch.Generator().manual_seed(seed)
    pitch, phase = 1 + 3 * torch.rand(count, 1, generator=g), 6.2832 * torch.rand(count, 1, generator=g)
    clean = torch.sin(torch.linspace(0, 6.2832, 48) * pitch + phase)
    return TensorDataset(clean + 0.2 * torch.randn(count, 48, generator=g), clean, pitch)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20, help="updates, each over three batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Coder(args.hidden)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    test = waves(64, args.seed + 3)
    losses, micro, last = [], [], 0.0
    while len(losses) < args.iters:
        engine.train()
        for noisy, clean, pitch in DataLoader(waves(480, args.seed), args.batch_size, shuffle=True, drop_last=True):
            found, told = engine(noisy)
            loss = F.mse_loss(found, clean) + 0.1 * F.smooth_l1_loss(told, pitch)
            engine.backward(loss)
            engine.step()
            micro.append(loss.item())
            if len(micro) == 3:
                losses.append(sum(micro) / 3)
                micro = []
                if len(losses) % 10 == 0:
                    print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                if len(losses) == args.iters:
                    break
        engine.eval()
        with torch.no_grad():
            noisy, clean, _ = test.tensors
            last = F.mse_loss(engine(noisy)[0], clean).item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "test": last}), flush=True)


if __name__ == "__main__":
    main()
