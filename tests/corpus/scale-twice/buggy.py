"""Training with a static loss scale: the loss is multiplied before backward, the gradients are divided after it."""
import argparse, json
import torch, torch.nn as nn, torch.nn.functional as F


class ScaledOptimizer:
    """Divides gradients by the scale before the update."""

    def __init__(self, optimizer, scale):
        self.optimizer = optimizer
        self.scale = scale

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.scale)
        self.optimizer.step()
        self.optimizer.zero_grad()


class AutoEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enc, self.dec = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return self.dec(torch.tanh(self.enc(x)))


def loss_of(model, x, scale):
    return F.mse_loss(model(x), x) * scale


def main(args):
    torch.manual_seed(args.seed)
    basis = torch.randn(3, 16)
    model = AutoEncoder(args.width)
    optimizer = ScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), args.scale)
    losses = []
    for it in range(args.iters):
        x = torch.randn(32, 3) @ basis
        loss = loss_of(model, x, args.scale)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=14)
    ap.add_argument("--scale", type=float, default=8.0)
    ap.add_argument("--width", type=int, default=8)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    main(args)
