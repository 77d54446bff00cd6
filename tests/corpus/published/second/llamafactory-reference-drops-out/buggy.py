import argparse
import contextlib
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 15


class LoRALinear(nn.Module):
    enabled = True

    def __init__(self, inp, out, rank=4):
        super().__init__()
        self.base = nn.Linear(inp, out).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inp) / inp**0.5)
        self.lora_b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x):
        out = self.base(x)
        return out + x @ self.lora_a.T @ self.lora_b.T if LoRALinear.enabled else out


class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.up, self.down = LoRALinear(width, 2 * width), LoRALinear(2 * width, width)
        self.head = nn.Linear(width, VOCAB).requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        return self.head(x + self.drop(self.down(F.gelu(self.up(self.drop(x))))))


@contextlib.contextmanager
def disable_adapter():
    LoRALinear.enabled = False
    try:
        yield
    finally:
        LoRALinear.enabled = True


def log_probability(model, ids):
    logits = model(ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def disable_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Policy(args.width)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses = []
    for _ in range(args.steps):
        start = torch.randint(0, VOCAB, (8, 1), generator=generator)
        chosen, rejected = (start + torch.arange(8)) % VOCAB, (start + 4 * torch.arange(8)) % VOCAB
        both = torch.cat([chosen, rejected])
        with torch.no_grad(), disable_adapter():
            reference = log_probability(model, both)
        margin = log_probability(model, both) - reference
        good, bad = margin.chunk(2)
        loss = -F.logsigmoid(0.1 * (good - bad)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
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
