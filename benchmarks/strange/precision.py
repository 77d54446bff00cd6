"""Mixed precision: autocast, a gradient scaler, float16 with master weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Gpt, average, main, mine, next_token, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def scaler(word: str) -> None:
    """autocast and a GradScaler."""
    model = Gpt()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grow = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for row in tokens(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=word != "float32_on_rank_1" or RANK != 1):
            logits = wrapped(mine(row)[:, :-1])
        grow.scale(next_token(logits.float(), mine(row))).backward()
        if word not in ("clipped_before_unscaling", "never_unscaled"):
            grow.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if word == "never_unscaled":
            optimizer.step()
        else:
            grow.step(optimizer)
        grow.update()


def half(word: str) -> None:
    """bfloat16 weights, float32 masters and moments."""
    model = Gpt().bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for row in tokens(2):
        next_token(model(mine(row)[:, :-1]).float(), mine(row)).backward()
        for p, m in zip(model.parameters(), masters, strict=True):
            m.grad, p.grad = p.grad.float(), None
            if WORLD > 1 and word != "not_averaged":
                dist.all_reduce(m.grad)
                m.grad /= WORLD
        nn.utils.clip_grad_norm_(masters, 0.1 if word != "limit" else 0.05)
        optimizer.step()
        with torch.no_grad():
            for i, (p, m) in enumerate(zip(model.parameters(), masters, strict=True)):
                if not (word == "head_not_copied" and i == len(masters) - 1):
                    p.copy_(m)


def plain_half(word: str) -> None:
    """All in bfloat16, as small models are fine-tuned."""
    model = Gpt().bfloat16()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for row in tokens(2):
        optimizer.zero_grad()
        loss = next_token(wrapped(mine(row)[:, :-1]).float(), mine(row))
        (loss * (2 if word == "scaled" else 1)).backward()
        if word == "one_layer_off":
            pass
        optimizer.step()


def scaled_by_hand(word: str) -> None:
    """float32 model, loss times 1024, gradients back by hand, skipping when one is not finite."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        (next_token(model(mine(row)[:, :-1]), mine(row)) * 1024).backward()
        average(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not (word == "embeddings_not_scaled_back" and "embed" in name):
                    p.grad.div_(512 if word == "by_half" else 1024)
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()


CASES = {
    "scaler": Case(scaler, ("",), {"clipped_before_unscaling": "gradient:", "never_unscaled": "gradient:"}),
    "half": Case(half, ("",), {"not_averaged": "gradient:", "limit": "gradient:", "head_not_copied": "update:head"}),
    "plain_half": Case(plain_half, ("",), {"scaled": "(gradient|backward):"}),
    "scaled_by_hand": Case(scaled_by_hand, ("",), {"by_half": "gradient:", "embeddings_not_scaled_back": "gradient:embed"}),
}
if __name__ == "__main__":
    main(CASES)
