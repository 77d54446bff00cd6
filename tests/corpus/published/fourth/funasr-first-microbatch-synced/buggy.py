import argparse
import json
import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Paraformer(nn.Module):
    def __init__(self, width, tokens=8):
        super().__init__()
        self.encoder = nn.GRU(5, width, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * width)
        self.ctc_lo = nn.Linear(2 * width, tokens)

    def forward(self, speech, speech_lengths, text, text_lengths):
        hidden, _ = self.encoder(speech)
        log_probs = F.log_softmax(self.ctc_lo(self.norm(hidden)), -1).transpose(0, 1)
        loss = F.ctc_loss(log_probs, text, speech_lengths, text_lengths, zero_infinity=True)
        return loss, {"loss": loss.detach()}


class Trainer:
    def __init__(self, rank, args):
        self.rank = rank
        self.accum_grad = args.accum_grad
        self.grad_clip = 5.0
        self.losses = []

    def batches(self, args):
        generator = torch.Generator().manual_seed(100 * args.seed + self.rank)
        for _ in range(args.steps * self.accum_grad):
            text = torch.randint(1, 8, (4, 3), generator=generator)
            speech = torch.randn(4, 12, 5, generator=generator) * 0.3
            for row in range(4):
                for place, word in enumerate(text[row].tolist()):
                    speech[row, 4 * place : 4 * place + 3, word % 5] += word / 4
            yield speech, torch.full((4,), 12), text, torch.full((4,), 3)

    def train_epoch(self, model, optim, scheduler, dataloader):
        model.train()
        optim.zero_grad()
        for batch_idx, batch in enumerate(dataloader):
            my_context = model.no_sync if batch_idx % self.accum_grad != 0 else nullcontext
            with my_context():
                loss, stats = model(*batch)
                (loss / self.accum_grad).backward()
            self.losses.append(stats["loss"].item())
            if (batch_idx + 1) % self.accum_grad == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=self.grad_clip)
                if not torch.isfinite(norm):
                    optim.zero_grad()
                    continue
                optim.step()
                scheduler.step()
                optim.zero_grad()


def worker(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    model = DDP(Paraformer(args.width))
    optim = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda k: min((k + 1) / 5, (5 / (k + 1)) ** 0.5))
    trainer = Trainer(rank, args)
    trainer.train_epoch(model, optim, scheduler, trainer.batches(args))
    every = [None] * world
    dist.all_gather_object(every, trainer.losses)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": every}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accum-grad", type=int, default=3)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (2, os.path.join(folder, "store"), args), nprocs=2)
