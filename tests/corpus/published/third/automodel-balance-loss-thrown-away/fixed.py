import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class AuxLossScaler(torch.autograd.Function):
    """Passes a tensor on and gives a loss its gradient."""

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output.clone()

    @staticmethod
    def backward(ctx, grad_output):
        (aux_loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(aux_loss)


class Gate(nn.Module):
    def __init__(self, width, experts, top_k, coefficient=0.05):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.experts, self.top_k, self.coefficient = experts, top_k, coefficient

    def forward(self, x):
        scores = F.linear(x, self.weight).softmax(-1)
        weights, indices = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            load = F.one_hot(indices, self.experts).sum(1).float().mean(0) / self.top_k
            aux_loss = self.coefficient * self.experts * (load * scores.mean(0)).sum()
            weights = AuxLossScaler.apply(weights, aux_loss)
        return weights, indices


class MoE(nn.Module):
    def __init__(self, width, experts=4, top_k=2):
        super().__init__()
        self.gate = Gate(width, experts, top_k)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, place = (indices == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(flat[row]) * weights[row, place, None])
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self, width, vocab=17):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.moe = MoE(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + self.moe(self.norm(h)))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        ids = (torch.randint(0, 17, (8, 1), generator=generator) + 3 * torch.arange(9)) % 17
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
