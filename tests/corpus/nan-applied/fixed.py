import argparse, json
import torch, torch.nn as nn


class Mixture(nn.Module):
    """Density of a point as a mixture whose centres and widths a network gives."""
    def __init__(self, parts, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, hidden), nn.Tanh())
        self.centre = nn.Linear(hidden, parts)
        self.width = nn.Linear(hidden, parts)
        self.share = nn.Linear(hidden, parts)
    def forward(self, x, y):
        h = self.body(x)
        z = (y - self.centre(h)) / nn.functional.softplus(self.width(h))
        density = (torch.softmax(self.share(h), 1) * torch.exp(-0.5 * z * z)).sum(1)
        return density

def loss_of(density):
    return -torch.log(density.clamp_min(1e-6)).mean()

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=20)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--hidden", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    model = Mixture(3, args.hidden)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for it in range(args.iters):
        x = torch.rand(24, 1) * 4 - 2
        y = torch.sin(2 * x) + 0.1 * torch.randn(24, 1)
        if it % 9 == 6:
            y[0] = 400.0  # an outlier, as measurements have them
        opt.zero_grad()
        loss = loss_of(model(x, y))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": [l if l == l else None for l in losses]}))

if __name__ == "__main__":
    main()
