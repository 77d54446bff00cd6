"""Character-level decoder-only language model on data/alice.txt and data/logbook.txt.

Tied input and output embeddings, AdamW with decay and no-decay groups, linear warmup then cosine (LambdaLR, per
step), gradient clipping, periodic validation, checkpoint saved at the end, reloaded into a fresh model and checked.

Class: language
"""
import argparse
import json
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

DATA = Path(__file__).resolve().parent / "data"


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, context, dropout=0.05):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._init)
        self.head.weight = self.tok.weight

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(tokens, batch_size, context):
    starts = torch.randint(len(tokens) - context - 1, (batch_size,)).tolist()
    x = torch.stack([tokens[s : s + context] for s in starts])
    y = torch.stack([tokens[s + 1 : s + 1 + context] for s in starts])
    return x, y


@torch.no_grad()
def estimate_loss(model, tokens, context):
    """Mean loss over the first non-overlapping windows of the validation text."""
    model.eval()
    rows = min(16, (len(tokens) - 1) // context)
    x = tokens[: rows * context].view(rows, context)
    y = tokens[1 : rows * context + 1].view(rows, context)
    loss = model(x, y).item()
    model.train()
    return loss


def lr_lambda(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=64, help="model dimension")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", default=None, help="folder for the checkpoint (default: a temporary one)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = (DATA / "alice.txt").read_text() + (DATA / "logbook.txt").read_text()
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    tokens = torch.tensor([stoi[c] for c in text])
    split = int(0.9 * len(tokens))
    train_tokens, val_tokens = tokens[:split], tokens[split:]

    config = {"vocab": len(chars), "dim": args.width, "heads": args.heads, "layers": args.layers, "context": args.context}
    model = GPT(**config)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: lr_lambda(s, warmup=max(1, args.iters // 10), total=args.iters)
    )

    losses = []
    model.train()
    for it in range(args.iters):
        x, y = get_batch(train_tokens, args.batch_size, args.context)
        loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if (it + 1) % 10 == 0:
            val = estimate_loss(model, val_tokens, args.context)
            print(f"iter {it + 1} loss {losses[-1]:.4f} val {val:.4f} norm {norm:.2f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(args.out or tmp, "transformer_lm.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": config, "iter": args.iters}, path)
        checkpoint = torch.load(path, weights_only=True)
    restored = GPT(**checkpoint["config"])
    restored.load_state_dict(checkpoint["model"])
    val = estimate_loss(model, val_tokens, args.context)
    again = estimate_loss(restored, val_tokens, args.context)
    print(f"final val {val:.4f}, after reload {again:.4f}", flush=True)
    assert val == again

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "val": val}), flush=True)


if __name__ == "__main__":
    main()
