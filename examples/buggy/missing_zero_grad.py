"""Predict film ratings with matrix factorisation and a small network on top (neural collaborative filtering).

Contains one silent bug: gradients are never cleared, so every step follows the sum of all gradients so far. Nothing
crashes and the loss still falls for a while; it just ends higher than it should. `--fixed` runs the healthy loop.
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def ratings(users, films, per_user, seed):
    """Return user ids, film ids and ratings around 3 stars, from hidden tastes plus noise."""
    g = torch.Generator().manual_seed(seed)
    taste, style = torch.randn(users, 4, generator=g), torch.randn(films, 4, generator=g)
    kindness, quality = 0.4 * torch.randn(users, generator=g), 0.5 * torch.randn(films, generator=g)
    user = torch.arange(users).repeat_interleave(per_user)
    film = torch.randint(0, films, (users * per_user,), generator=g)
    score = 3 + kindness[user] + quality[film] + 0.5 * (taste[user] * style[film]).sum(1)
    return user, film, (score + 0.2 * torch.randn(len(user), generator=g)).clamp(1, 5)


class NeuralCF(nn.Module):
    def __init__(self, users, films, width):
        super().__init__()
        self.user_embedding = nn.Embedding(users, width)
        self.film_embedding = nn.Embedding(films, width)
        self.user_bias = nn.Embedding(users, 1)
        self.film_bias = nn.Embedding(films, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        self.mean = nn.Parameter(torch.tensor(3.0))
        for table in (self.user_embedding, self.film_embedding):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.film_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user, film):
        u, f = self.user_embedding(user), self.film_embedding(film)
        bias = self.user_bias(user) + self.film_bias(film)
        deep = self.mlp(torch.cat([u, f], dim=1))
        return self.mean + (bias + deep).squeeze(1) + (u * f).sum(1)


@torch.no_grad()
def rmse(model, loader):
    model.eval()
    total = count = 0
    for user, film, score in loader:
        total += F.mse_loss(model(user, film), score, reduction="sum").item()
        count += len(score)
    return (total / count) ** 0.5


def train(model, loader, optimizer, args, losses):
    model.train()
    for user, film, score in loader:
        if len(losses) == args.iters:
            break
        if args.fixed:
            optimizer.zero_grad()
        loss = F.mse_loss(model(user, film), score)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            print(f"iter {len(losses)} loss {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--fixed", action="store_true", help="clear the gradients before every backward pass")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    users, films = 120, 80
    user, film, score = ratings(users, films, 40, args.seed)
    order = torch.randperm(len(user))
    train_rows, test_rows = order[: int(0.85 * len(order))], order[int(0.85 * len(order)):]
    train_loader = DataLoader(
        TensorDataset(user[train_rows], film[train_rows], score[train_rows]), batch_size=args.batch_size, shuffle=True
    )
    test_loader = DataLoader(TensorDataset(user[test_rows], film[test_rows], score[test_rows]), batch_size=256)

    model = NeuralCF(users, films, args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    losses, evals = [], []
    while len(losses) < args.iters:
        train(model, train_loader, optimizer, args, losses)
        evals.append(rmse(model, test_loader))
        print(f"iter {len(losses)} test error {evals[-1]:.3f} stars", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "evals": evals}), flush=True)


if __name__ == "__main__":
    main()
