"""Classify chirps with accelerate: `accumulate`, `clip_grad_norm_` on sync steps, save_state, load_state.

Inside `accumulate` the prepared optimizer skips its own `step` and `zero_grad` until the gradients are due, so the
loop calls both every micro-batch. The state saved in the middle is loaded at the end and must give back that
evaluation. `--iters` counts real updates, two micro-batches each.

Class: signal
"""
import argparse
import json
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
except ImportError as missing:
    print(f"accelerate_classifier needs accelerate: {missing}", file=sys.stderr)
    sys.exit(77)


def chirps(count, length, seed):
    """Tones whose frequency rises, falls, or stays; the class says which."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=g)
    time = torch.linspace(0, 1, length)
    start = 8 + 8 * torch.rand(count, 1, generator=g)
    slope = torch.tensor([10.0, -7.0, 0.0])[labels][:, None]
    phase = 6.2832 * (start * time + slope * time ** 2 + torch.rand(count, 1, generator=g))
    return TensorDataset(phase.sin() + 0.2 * torch.randn(count, length, generator=g), labels)


class SpectrumNet(nn.Module):
    """A convolution over short-time spectra."""

    def __init__(self, channels, classes=3):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32).clone())
        self.conv = nn.Sequential(
            nn.Conv1d(17, channels, 3, padding=1), nn.BatchNorm1d(channels), nn.GELU(),
            nn.Conv1d(channels, channels, 3, padding=1), nn.GELU(),
        )
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, wave):
        frames = wave.unfold(-1, 32, 8) * self.window
        spectrum = torch.fft.rfft(frames).abs().add(1e-3).log().transpose(1, 2)
        h = self.conv(spectrum)
        return self.head(torch.cat([h[..., : h.shape[-1] // 2].mean(-1), h[..., h.shape[-1] // 2:].mean(-1)], -1))


def evaluate(accelerator, model, loader):
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for wave, label in loader:
            predictions, labels = accelerator.gather_for_metrics((model(wave).argmax(-1), label))
            right += (predictions == labels).sum().item()
            seen += len(labels)
    model.train()
    return right / seen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one micro-batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(args.seed)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = SpectrumNet(args.channels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.iters + 1)
    train_loader = DataLoader(chirps(384, 192, args.seed), args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(chirps(90, 192, args.seed + 1), 32)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    losses, running, saved = [], [], None
    with tempfile.TemporaryDirectory() as folder:
        model.train()
        while len(losses) < args.iters:
            for wave, label in train_loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(wave), label)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                running.append(loss.item())
                if not accelerator.sync_gradients:
                    continue
                losses.append(sum(running) / len(running))
                running = []
                if len(losses) % 10 == 0:
                    accelerator.print(f"iter {len(losses)} loss {losses[-1]:.4f}")
                if saved is None and len(losses) == max(1, args.iters // 2):
                    accelerator.save_state(folder)
                    saved = evaluate(accelerator, model, test_loader)
                if len(losses) == args.iters:
                    break
        final = evaluate(accelerator, model, test_loader)
        param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        accelerator.load_state(folder)
        print(f"state loads back: {evaluate(accelerator, model, test_loader) == saved}", flush=True)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": [saved, final]}), flush=True)


if __name__ == "__main__":
    main()
