import argparse, json
import torch, torch.nn as nn


class Scorer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.top = nn.Linear(width, 3)
    def forward(self, x):
        return self.top(self.trunk(x))

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=20)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--width", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(256, 6)
    y = (x[:, :3] + x[:, 3:]).argmax(1)
    model = Scorer(args.width)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for it in range(args.iters):
        if it == 8:
            for p in model.trunk.parameters():
                p.requires_grad_(False)
        rows = torch.randint(0, 256, (32,))
        opt.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))

if __name__ == "__main__":
    main()
