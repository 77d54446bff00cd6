"""A classifier with a batch norm, dropout and a loader; `--bug NAME` plants one of its bugs."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG = ap.parse_args().bug
torch.manual_seed(0)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0 / (grad.size(0) / 32 if BUG == "backward_by_batch" else 1.0)


class Normed(nn.Module):
    """A norm of one's own."""

    def __init__(self, d):
        super().__init__()
        self.bn = nn.BatchNorm1d(d, track_running_stats=BUG != "norm_as_told")
        self.register_buffer("level", torch.ones(()), persistent=BUG != "buffer_not_saved")
        self.count = 0

    def forward(self, x):
        if BUG == "norm_of_batch":
            x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        elif BUG == "running_by_hand":
            x = F.batch_norm(x, None, None, training=True)
        elif BUG == "variance_cancels":
            y = x + 3000.0
            x = (y - y.mean(1, keepdim=True)) / ((y * y).mean(1, keepdim=True) - y.mean(1, keepdim=True) ** 2).abs().add(1e-3).sqrt()
        else:
            x = self.bn(x)
        if BUG in ("buffer_not_saved", "buffer"):
            x = x / self.level
        if BUG == "counter":
            self.count += 1
            x = x * (1.0 + 0.1 * self.count)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), Normed(16), nn.Linear(16, 16)
        self.side, self.head = nn.Linear(4, 16), nn.Linear(16, 5)
        self.memory = None

    def forward(self, x, extra):
        h = self.norm(torch.tanh(self.fc1(x)))
        if BUG == "dropout_in_evaluation":
            h = F.dropout(h, 0.2)
        else:
            h = F.dropout(h, 0.2, training=self.training)
        if BUG == "half_inside":
            h = h.half().float()
        if BUG == "branch_detached":
            h = h + self.fc2(h.detach()).detach()
        else:
            h = h + torch.relu(self.fc2(h))
        if BUG != "input_forgotten":
            h = h + self.side(extra)
        else:
            h = h + self.side(extra * 0)
        if BUG == "batch_softmax":
            h = h * torch.softmax(h, 0)
        if BUG == "divided_by_batch":
            h = h / x.size(0) * 32
        if BUG == "memory":
            h = h + (self.memory if self.memory is not None and self.memory.shape == h.shape else 0)
            self.memory = h.detach()
        if BUG == "row_weights":
            h = h * torch.linspace(0.5, 1.5, x.size(0)).unsqueeze(1)
        return self.head(Scale.apply(h))


x, extra = torch.randn(256, 8), torch.randn(256, 4)
data = TensorDataset(x, extra, (x.sum(1) + extra.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
if BUG == "model_replaced":
    net = Net()
for _ in range(2):
    for a, b, y in DataLoader(data, batch_size=32, shuffle=True):
        net.train()
        optimizer.zero_grad()
        F.cross_entropy(net(a, b), y).backward()
        optimizer.step()
        net.norm.level.mul_(0.9).add_(0.05)
