import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 17


class SelfAttention(nn.Module):
    def __init__(self, width, dropout_p):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout_p = dropout_p

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout_p = self.dropout_p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(16, width)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, 0.2)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm1(x))
        return self.head(self.norm3(x + self.mlp(self.norm2(x))))


def batch(generator):
    ids = (torch.randint(0, VOCAB, (8, 1), generator=generator) + 2 * torch.arange(11)) % VOCAB
    return ids[:, :-1], ids[:, 1:].reshape(-1)


@torch.no_grad()
def evaluate(model, generator):
    model.eval()
    x, y = batch(generator)
    loss = F.cross_entropy(model(x).flatten(0, 1), y).item()
    model.train()
    return loss


def main(args):
    generator, held = torch.Generator().manual_seed(args.seed + 1), torch.Generator().manual_seed(args.seed + 2)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses, scores = [], []
    for step in range(args.steps):
        x, y = batch(generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            scores.append(evaluate(model, held))
    print("RESULT " + json.dumps({"losses": losses, "scores": scores}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
