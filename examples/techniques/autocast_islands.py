"""Bearing-fault detection under bf16 autocast with an island of float32 inside the model.

Tricky: dtypes change within one forward. The envelope layer switches autocast off and casts to float32 for its FFT,
the rest runs in bfloat16, the loss in float32; parameters and gradients stay float32. No scaler is needed for
bfloat16.

Class: signal
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


class Envelope(nn.Module):
    """Log spectrum of the analytic signal's magnitude, in float32 whatever the context."""

    def __init__(self, length):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(length // 4))
        step = torch.zeros(length)
        step[0] = 1
        step[1:length // 2] = 2
        self.register_buffer("step", step, persistent=False)

    def forward(self, wave):
        with torch.autocast(wave.device.type, enabled=False):
            analytic = torch.fft.ifft(torch.fft.fft(wave.float()) * self.step)
            magnitude = analytic.abs()
            spectrum = torch.fft.rfft(magnitude - magnitude.mean(-1, keepdim=True)).abs()
            return torch.log1p(spectrum[:, :len(self.gain)]) * self.gain


class FaultNet(nn.Module):
    def __init__(self, length, hidden, faults=4):
        super().__init__()
        self.envelope = Envelope(length)
        self.raw = nn.Conv1d(1, 8, 16, stride=8)
        self.mix = nn.Sequential(nn.Linear(length // 4 + 8, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(hidden, faults)

    def forward(self, wave):
        raw = self.raw(wave[:, None]).abs().mean(-1)
        return self.out(self.mix(torch.cat([self.envelope(wave), raw.float()], dim=1)))


def vibrations(count, length, seed):
    """A carrier whose amplitude is modulated at a rate that the fault determines; class 0 has none."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=g)
    time = torch.arange(length) / length
    rate = torch.tensor([0.0, 5.0, 9.0, 14.0])[labels][:, None]
    phase = 6.2832 * torch.rand(count, 2, 1, generator=g)
    wave = (1 + 0.8 * (6.2832 * rate * time + phase[:, 0]).sin()) * (6.2832 * 40 * time + phase[:, 1]).sin()
    return wave + 0.5 * torch.randn(count, length, generator=g), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    waves, labels = vibrations(512, 128, args.seed)
    test_waves, test_labels = vibrations(128, 128, args.seed + 1)
    model = FaultNet(128, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses, accuracy = [], []
    for it in range(1, args.iters + 1):
        model.train()
        rows = torch.randint(0, len(labels), (args.batch_size,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(waves[rows])
        loss = F.cross_entropy(logits.float(), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if it % max(1, args.iters // 3) == 0:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                accuracy.append((model(test_waves).argmax(1) == test_labels).float().mean().item())
            print(f"iter {it} loss {losses[-1]:.4f} test accuracy {accuracy[-1]:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
