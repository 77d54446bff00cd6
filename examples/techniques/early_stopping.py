"""Early stopping by patience, with the best weights restored before every new attempt.

Tricky: a DataLoader whose last batch is smaller, weights that jump back to an earlier state, a learning rate that
is lowered by hand when that happens, and after that training goes on with the same optimizer until `--iters`.

Class: tabular
"""
import argparse
import copy
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.weights = patience, float("inf"), 0, None

    def update(self, value, model):
        """True when `patience` evaluations in a row were no better."""
        if value < self.best - 1e-4:
            self.best, self.bad, self.weights = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def wine(count, seed):
    """Eleven correlated measurements and a quality score."""
    g = torch.Generator().manual_seed(seed)
    factors = torch.randn(count, 4, generator=g)
    loadings = torch.randn(4, 11, generator=torch.Generator().manual_seed(5))
    x = factors @ loadings + 0.5 * torch.randn(count, 11, generator=g)
    quality = factors[:, 0].tanh() + 0.5 * factors[:, 1] * factors[:, 2] + 0.3 * torch.randn(count, generator=g)
    return TensorDataset((x - x.mean(0)) / x.std(0), quality[:, None])


def evaluate(model, loader, criterion):
    model.eval()
    total = rows = 0
    with torch.no_grad():
        for x, y in loader:
            total += criterion(model(x), y).item() * len(x)
            rows += len(x)
    return total / rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=72)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--patience", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, val_set = random_split(wine(310, args.seed), [230, 80])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=80)
    model = nn.Sequential(
        nn.Linear(11, args.hidden), nn.ELU(), nn.Linear(args.hidden, args.hidden), nn.ELU(), nn.Linear(args.hidden, 1)
    )
    criterion = nn.HuberLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    stopper = EarlyStopping(args.patience)

    losses, restarts = [], 0
    while len(losses) < args.iters:
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == args.iters:
                break
        error = evaluate(model, val_loader, criterion)
        print(f"iter {len(losses)} train {losses[-1]:.4f} validation {error:.4f}", flush=True)
        if stopper.update(error, model):
            model.load_state_dict(stopper.weights)
            for group in optimizer.param_groups:
                group["lr"] *= 0.3
            stopper.bad, restarts = 0, restarts + 1
            print(f"back to the weights of {stopper.best:.4f}, learning rate {optimizer.param_groups[0]['lr']:.5f}", flush=True)

    model.load_state_dict(stopper.weights)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    best = evaluate(model, val_loader, criterion)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "best": best, "restarts": restarts}), flush=True)


if __name__ == "__main__":
    main()
