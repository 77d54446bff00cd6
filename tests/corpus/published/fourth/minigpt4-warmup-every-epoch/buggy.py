import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import nn


def cosine_lr_schedule(optimizer, epoch, max_epoch, init_lr, min_lr):
    lr = (init_lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * epoch / max_epoch)) + min_lr
    for group in optimizer.param_groups:
        group["lr"] = lr


def warmup_lr_schedule(optimizer, step, max_step, init_lr, max_lr):
    lr = min(max_lr, init_lr + (max_lr - init_lr) * step / max(max_step, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr


class LinearWarmupCosineLRScheduler:
    def __init__(self, optimizer, max_epoch, iters_per_epoch, min_lr, init_lr, warmup_steps=0, warmup_start_lr=-1):
        self.optimizer = optimizer
        self.max_epoch = max_epoch
        self.iters_per_epoch = iters_per_epoch
        self.min_lr = min_lr
        self.init_lr = init_lr
        self.warmup_steps = warmup_steps
        self.warmup_start_lr = warmup_start_lr if warmup_start_lr >= 0 else init_lr

    def step(self, cur_epoch, cur_step):
        total_cur_step = cur_epoch * self.iters_per_epoch + cur_step
        if total_cur_step < self.warmup_steps:
            warmup_lr_schedule(self.optimizer, cur_step, self.warmup_steps, self.warmup_start_lr, self.init_lr)
        else:
            cosine_lr_schedule(self.optimizer, total_cur_step, self.max_epoch * self.iters_per_epoch, self.init_lr, self.min_lr)


class Projector(nn.Module):
    """Image features become words before a small language model."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.visual = nn.Linear(12, width).requires_grad_(False)
        self.llama_proj = nn.Linear(width, width)
        self.words = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, image, text):
        prefix = self.llama_proj(torch.tanh(self.visual(image)))
        x = torch.cat([prefix, self.words(text)], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.lm_head(self.layer(x, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits[:, prefix.shape[1] - 1 : -1].flatten(0, 1), text.flatten())


class RunnerBase:
    def __init__(self, args):
        self.args = args
        self.model = Projector(18, args.width)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=8e-3, weight_decay=0.05, betas=(0.9, 0.98))
        self.lr_scheduler = LinearWarmupCosineLRScheduler(self.optimizer, args.epochs, args.iters, 1e-4, 8e-3, warmup_steps=14, warmup_start_lr=1e-4)
        self.generator = torch.Generator().manual_seed(args.seed + 1)
        self.losses = []

    def batch(self):
        image = torch.randn(8, 3, 12, generator=self.generator)
        first = image[:, 0].argmax(1, keepdim=True)
        return image, (first + torch.arange(5)) % 18

    def train_epoch(self, epoch):
        self.model.train()
        for i in range(self.args.iters):
            self.lr_scheduler.step(cur_epoch=epoch, cur_step=i)
            loss = self.model(*self.batch())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def train(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
        return self.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--iters", type=int, default=6)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    print("RESULT " + json.dumps({"losses": RunnerBase(args).train()}))
