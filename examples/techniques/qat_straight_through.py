"""Quantisation-aware training of a gesture recogniser: 8-bit weights and activations with straight-through gradients.

Tricky: the forward uses rounded copies of the weights while the optimizer updates the full-precision ones;
activation ranges are observers in buffers, which move for the first half of the run and are then frozen; the
gradient of rounding is that of the identity.

Class: signal
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F


def fake_quantize(x, scale, bits=8):
    """`x` rounded to the grid `scale`, with the gradient of a clamp."""
    top = 2 ** (bits - 1) - 1
    clamped = (x / scale).clamp(-top - 1, top)
    return scale * (clamped + (clamped.round() - clamped).detach())


class QuantLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127 + 1e-8
        return F.linear(x, fake_quantize(self.weight, scale), self.bias)


class Observer(nn.Module):
    """Running maximum of the magnitude as the scale of the activations."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.0))
        self.enabled = True

    def forward(self, x):
        if self.training and self.enabled:
            now = x.detach().abs().max() / 127
            self.scale.copy_(now if self.scale == 0 else 0.9 * self.scale + 0.1 * now)
        return fake_quantize(x, self.scale.clamp_min(1e-8))


class GestureNet(nn.Module):
    def __init__(self, hidden, classes=5):
        super().__init__()
        self.inp = Observer()
        self.fc1 = QuantLinear(3 * 20, hidden)
        self.act1 = Observer()
        self.fc2 = QuantLinear(hidden, hidden)
        self.act2 = Observer()
        self.fc3 = QuantLinear(hidden, classes)

    def forward(self, x):
        h = self.act1(F.relu(self.fc1(self.inp(x.flatten(1)))))
        return self.fc3(self.act2(F.relu6(self.fc2(h))))

    def freeze_observers(self):
        for module in self.modules():
            if isinstance(module, Observer):
                module.enabled = False


def gestures(count, seed):
    """Three acceleration channels over 20 samples; five movements with their own phases and rates."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count,), generator=g)
    time = torch.linspace(0, 1, 20)
    rate = (1 + labels % 3)[:, None, None]
    lag = torch.arange(3)[None, :, None] * (labels[:, None, None] - 2) * 0.8
    speed = 1 + 0.1 * torch.randn(count, 1, 1, generator=g)
    return torch.sin(6.2832 * rate * speed * time + lag) + 0.3 * torch.randn(count, 3, 20, generator=g), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x, labels = gestures(800, args.seed)
    model = GestureNet(args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    losses = []
    model.train()
    for it in range(1, args.iters + 1):
        if it == args.iters // 2:
            model.freeze_observers()
        rows = torch.randint(0, len(labels), (args.batch_size,))
        loss = F.cross_entropy(model(x[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if it % 20 == 0:
            print(f"iter {it} loss {losses[-1]:.4f} scale {model.act1.scale.item():.5f}", flush=True)

    model.eval()
    x, labels = gestures(200, args.seed + 1)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == labels).float().mean().item()
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
