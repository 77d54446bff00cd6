import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class ParlAILRScheduler:
    """A warmup, then the rate that a schedule of its own gives."""

    def __init__(self, optimizer, opt):
        self.warmup_updates = opt["warmup_updates"]
        self.warmup_rate = opt["warmup_rate"]
        self.max_lr_steps = opt["max_lr_steps"]
        self._number_training_updates = 0
        self.warmup_scheduler = LambdaLR(optimizer, self._warmup_lr)
        self.scheduler = None
        self.optimizer = optimizer

    def _warmup_lr(self, step):
        start = self.warmup_rate
        end = 1.0
        progress = min(1.0, step / self.warmup_updates)
        return start + (end - start) * progress

    def _is_lr_warming_up(self):
        return (
            self.warmup_scheduler is not None
            and self._number_training_updates < self.warmup_updates
        )

    def step(self, num_steps):
        self._number_training_updates = num_steps
        if self._is_lr_warming_up():
            self.warmup_scheduler.step()
        else:
            if self.scheduler is None:
                for group in self.optimizer.param_groups:
                    group.pop("initial_lr", None)
                self.scheduler = LambdaLR(self.optimizer, lambda k: max(0.0, 1.0 - k / self.max_lr_steps))
            self.scheduler.step()


class TransformerRanker(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.context = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.candidate = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, contexts, candidates):
        c = self.context(self.embeddings(contexts)).mean(1)
        r = self.candidate(self.embeddings(candidates).mean(1))
        return c @ r.t() / c.shape[-1] ** 0.5


class TorchRankerAgent:
    def __init__(self, opt):
        self.opt = opt
        self.model = TransformerRanker(30, opt["width"])
        self.optimizer = torch.optim.Adamax(self.model.parameters(), lr=opt["learningrate"])
        self.scheduler = ParlAILRScheduler(self.optimizer, opt)
        self._number_training_updates = 0

    def update_params(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.opt["gradient_clip"])
        self.optimizer.step()
        self._number_training_updates += 1
        self.scheduler.step(self._number_training_updates)

    def train_step(self, contexts, candidates):
        self.model.train()
        self.optimizer.zero_grad()
        scores = self.model(contexts, candidates)
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        loss.backward()
        self.update_params()
        return loss.item()


def main(opt):
    torch.manual_seed(opt["seed"])
    agent = TorchRankerAgent(opt)
    generator = torch.Generator().manual_seed(opt["seed"] + 1)
    losses = []
    for _ in range(opt["steps"]):
        contexts = torch.randint(0, 30, (10, 6), generator=generator)
        losses.append(agent.train_step(contexts, contexts[:, ::2].flip(1)))
    rate = agent.optimizer.param_groups[0]["lr"]
    print("RESULT " + json.dumps({"losses": losses, "rate": rate}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--learningrate", type=float, default=1e-2)
    parser.add_argument("--warmup-updates", type=int, default=8)
    parser.add_argument("--warmup-rate", type=float, default=0.05)
    parser.add_argument("--max-lr-steps", type=int, default=24)
    parser.add_argument("--gradient-clip", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    main(vars(parser.parse_args()))
