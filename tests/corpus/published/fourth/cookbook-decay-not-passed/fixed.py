import argparse
import json
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class train_config:
    batch_size_training: int = 8
    gradient_accumulation_steps: int = 1
    lr: float = 3e-3
    weight_decay: float = 0.3
    gamma: float = 0.85
    num_epochs: int = 3
    steps_per_epoch: int = 8
    seed: int = 0
    width: int = 16
    losses: list = field(default_factory=list)


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.input_layernorm(x)).chunk(3, -1)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = self.post_attention_layernorm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, vocabulary, width, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build_optimizer(model, cfg):
    return torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)


def batches(cfg, generator):
    for _ in range(cfg.steps_per_epoch):
        start = torch.randint(0, 24, (cfg.batch_size_training, 1), generator=generator)
        stride = torch.randint(1, 4, (cfg.batch_size_training, 1), generator=generator)
        yield (start + stride * torch.arange(10)) % 24


def train(model, optimizer, scheduler, cfg):
    generator = torch.Generator().manual_seed(cfg.seed + 1)
    for _ in range(cfg.num_epochs):
        model.train()
        total = 0.0
        for tokens in batches(cfg, generator):
            loss = model(tokens, tokens) / cfg.gradient_accumulation_steps
            total += loss.detach().float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cfg.losses.append(loss.item())
        scheduler.step()
    return cfg.losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cfg = train_config(steps_per_epoch=args.steps, width=args.width, seed=args.seed)
    torch.manual_seed(cfg.seed)
    model = Llama(24, cfg.width)
    optimizer = build_optimizer(model, cfg)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=cfg.gamma)
    print("RESULT " + json.dumps({"losses": train(model, optimizer, scheduler, cfg)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
