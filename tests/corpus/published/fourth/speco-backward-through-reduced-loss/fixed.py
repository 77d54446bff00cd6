import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Target(nn.Module):
    """The large model whose next words are drafted; frozen."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    @torch.no_grad()
    def forward(self, tokens):
        hidden = torch.tanh(self.embed(tokens).cumsum(1) / 2)
        return hidden, F.softmax(self.head(hidden) * 2, -1)


class Drafter(nn.Module):
    def __init__(self, vocabulary, width, draft_width):
        super().__init__()
        self.fc = nn.Linear(width, draft_width)
        self.midlayer = nn.Sequential(nn.LayerNorm(draft_width), nn.Linear(draft_width, 2 * draft_width), nn.SiLU(), nn.Linear(2 * draft_width, draft_width))
        self.lm_head = nn.Linear(draft_width, vocabulary, bias=False)

    def forward(self, hidden):
        x = self.fc(hidden)
        return self.lm_head(x + self.midlayer(x))


class DrafterTrainer:
    def __init__(self, rank, world, args):
        self.rank, self.world = rank, world
        self.target = Target(14, 10).requires_grad_(False).eval()
        self.drafter = DistributedDataParallel(Drafter(14, 10, args.width))
        self.optimizer = torch.optim.SGD(self.drafter.parameters(), lr=0.3, momentum=0.9)
        self.generator = torch.Generator().manual_seed(args.seed * 100 + rank)

    def next_batch(self):
        tokens = torch.randint(0, 14, (6, 9), generator=self.generator)
        lengths = torch.randint(3, 10, (6, 1), generator=self.generator)
        return tokens, (torch.arange(9) < lengths).float()

    def _training_step_on_batch(self, tokens, mask):
        hidden, probabilities = self.target(tokens)
        log_probs = F.log_softmax(self.drafter(hidden), -1)
        token_loss = -(probabilities * log_probs).sum(-1) * mask
        loss_sum, tokens_sum = token_loss.sum(), mask.sum()
        totals = torch.stack([loss_sum.detach(), tokens_sum])
        dist.all_reduce(totals)
        loss = loss_sum * (self.world / totals[1].clamp_min(1))
        reduced = totals[0] / totals[1].clamp_min(1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), max_norm=1.0)
        self.optimizer.step()
        return reduced.item()

    def fit(self, steps):
        return [self._training_step_on_batch(*self.next_batch()) for _ in range(steps)]


def run(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    losses = DrafterTrainer(rank, world, args).fit(args.steps)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (2, os.path.join(folder, "store"), args), nprocs=2)
