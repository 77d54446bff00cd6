import argparse, json
import torch, torch.nn as nn


class Forecaster(nn.Module):
    def __init__(self, lags, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(lags, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 1))
    def forward(self, x):
        return self.net(x)

class Average:
    """Exponential average of weights, used for evaluation."""
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup = {}
    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p, alpha=1 - self.decay)
    @torch.no_grad()
    def apply(self, model):
        for n, p in model.named_parameters():
            self.backup[n] = p.detach().clone()
            p.copy_(self.shadow[n])
    @torch.no_grad()
    def restore(self, model):
        for n, p in model.named_parameters():
            p.copy_(self.backup[n])

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=20)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--hidden", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    t = torch.arange(400) / 9
    series = torch.sin(t) + 0.4 * torch.sin(3.1 * t) + 0.05 * torch.randn(400)
    windows = series.unfold(0, 9, 1)
    model = Forecaster(8, args.hidden)
    average = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for it in range(args.iters):
        batch = windows[torch.randint(0, 300, (32,))]
        opt.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(batch[:, :8]).squeeze(1), batch[:, 8])
        loss.backward()
        opt.step()
        average.update(model)
        losses.append(loss.item())
        if it % 4 == 3:
            average.apply(model)
            model.eval()
            with torch.no_grad():
                held = nn.functional.mse_loss(model(windows[300:, :8]).squeeze(1), windows[300:, 8]).item()
            model.train()
            average.restore(model)
    print("RESULT " + json.dumps({"losses": losses, "held": held}))

if __name__ == "__main__":
    main()
