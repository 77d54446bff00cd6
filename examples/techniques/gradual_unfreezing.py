"""Gradual unfreezing of a pretrained text encoder: head first, then one layer after another.

Tricky: the set of trained parameters grows during the run. Frozen layers have no gradients, and when one is thawed
its parameters join the same optimizer through `add_param_group` with a smaller learning rate (as in ULMFiT).

Class: language
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH = 40, 16


class Encoder(nn.Module):
    def __init__(self, dim, layers=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )

    def forward(self, tokens):
        h = self.embed(tokens) + self.position
        for layer in self.layers:
            h = layer(h)
        return h


class Classifier(nn.Module):
    def __init__(self, encoder, dim, classes):
        super().__init__()
        self.encoder = encoder
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, tokens):
        return self.fc(self.norm(self.encoder(tokens).mean(1)))


def chain(count):
    """Sequences of a Markov chain and their kind: the next symbol is 0–1, 2–3 or 4–5 places after the last one."""
    kinds = torch.randint(0, 3, (count,))
    start = torch.randint(0, 10, (count, 1))
    steps = 2 * kinds[:, None] + torch.randint(0, 2, (count, LENGTH - 1))
    return torch.cat([start, start + steps.cumsum(1)], 1) % VOCAB, kinds


def pretrain(encoder, dim, steps):
    """The encoder learns to fill in a symbol that was blanked in the middle."""
    head = nn.Linear(dim, VOCAB)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        tokens, _ = chain(32)
        blanked = tokens.clone()
        blanked[:, LENGTH // 2] = 0
        loss = F.cross_entropy(head(encoder(blanked)[:, LENGTH // 2]), tokens[:, LENGTH // 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"pretrained for {steps} steps, loss {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dim", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--pretrain-iters", type=int, default=25)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    encoder = Encoder(args.dim)
    pretrain(encoder, args.dim, args.pretrain_iters)

    encoder.requires_grad_(False)
    model = Classifier(encoder, args.dim, 3)
    optimizer = torch.optim.AdamW([*model.norm.parameters(), *model.fc.parameters()], lr=args.lr)
    stage = max(1, args.iters // 4)
    frozen = list(encoder.layers)

    losses = []
    model.train()
    for it in range(args.iters):
        if it and it % stage == 0 and frozen:
            layer = frozen.pop().requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": optimizer.param_groups[-1]["lr"] / 2.6})
            print(f"iter {it}: layer {len(frozen)} thawed, loss {losses[-1]:.4f}", flush=True)
        tokens, kinds = chain(args.batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), kinds)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trained {trained} of {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
