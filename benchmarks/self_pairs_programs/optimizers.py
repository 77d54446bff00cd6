"""An optimizer and a schedule of one's own; `--bug NAME` plants one of the bugs."""

import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--bug", default="")
BUG = ap.parse_args().bug
torch.manual_seed(0)


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, beta=0.9, decay=0.1):
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay, "foreach": False})
        self.velocity = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            speeds = [self._speed(p) for p in held]
            if group["foreach"]:
                torch._foreach_mul_(speeds, group["beta"])
                torch._foreach_add_(speeds, [p.grad for p in held])
                if BUG != "decay_forgotten":
                    torch._foreach_mul_(held, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(held, speeds, alpha=-group["lr"])
                continue
            for p, v in zip(held, speeds):
                v.mul_(group["beta"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(v, alpha=-group["lr"])

    def _speed(self, p):
        if BUG == "state_beside":
            return self.velocity.setdefault(p, torch.zeros_like(p))
        return self.state[p].setdefault("velocity", torch.zeros_like(p))


class Halving(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self.seen = 0
        super().__init__(optimizer)

    def state_dict(self):
        state = super().state_dict()
        if BUG == "schedule_lost":
            state.pop("seen")
        return state

    def get_lr(self):
        self.seen += 1
        return [base * 0.5 ** (self.seen // 2) for base in self.base_lrs]


model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Momentum(model.parameters())
schedule = Halving(optimizer)
for _ in range(8):
    x = torch.randn(16, 6)
    optimizer.zero_grad()
    (model(x).squeeze(-1) - x[:, 0]).pow(2).mean().backward()
    optimizer.step()
    schedule.step()
