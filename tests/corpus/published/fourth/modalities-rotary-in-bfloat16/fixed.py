import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class RotaryTransform(nn.Module):
    def __init__(self, head_dim, base_freq=10_000):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base_freq ** (torch.arange(0, head_dim, 2).float() / head_dim)), persistent=False)
        self._cached = None

    def _update_cos_sin_tables(self, x):
        length = x.shape[-2]
        if self._cached is None or self._cached[0].shape[-2] < length or self._cached[0].dtype != x.dtype:
            t = torch.arange(length, dtype=torch.float32)
            freqs = torch.outer(t, self.inv_freq)
            phases = torch.cat([freqs, freqs], -1)
            self._cached = phases.cos()[None, None].to(x.dtype), phases.sin()[None, None].to(x.dtype)
        return self._cached

    def forward(self, q, k):
        cos, sin = self._update_cos_sin_tables(k)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    @staticmethod
    def _rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos[:, :, : x.shape[-2]] + torch.cat([-second, first], -1) * sin[:, :, : x.shape[-2]]


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.q_attn, self.k_attn, self.v_attn = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.q_attn, self.k_attn, self.v_attn))
        q, k = self.rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class GPT2Block(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, rotary)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.attention_norm(x))
        return x + self.mlp(self.ffn_norm(x))


class GPT2LLM(nn.Module):
    def __init__(self, vocabulary, width, heads=2, layers=2):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        rotary = RotaryTransform(width // heads)
        self.h = nn.ModuleList(GPT2Block(width, heads, rotary) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = GPT2LLM(16, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for _ in range(args.steps):
        tokens = torch.randint(0, 16, (2, args.length + 1), generator=generator)
        tokens[:, 12:] = tokens[:, :-12].clone()[:, : args.length - 11]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    main(parser.parse_args())
