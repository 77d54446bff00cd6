"""Programs that torchrun starts, or that run alone: DDP, gradients that are averaged by hand, accelerate, `Trainer`, lightning; `--bug NAME` plants one of the bugs."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ap = argparse.ArgumentParser()
ap.add_argument("--with", dest="way", default="ddp")
ap.add_argument("--bug", default="")
asked = ap.parse_args()
bug, way = asked.bug, asked.way
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.set_num_threads(1)
torch.manual_seed(rank + 1 if bug == "seeds_of_model" else 0)
vocabulary, length = 40, 12
ids = torch.randint(1, vocabulary, (96, length), generator=torch.Generator().manual_seed(3))
lengths = torch.randint(3, length, (96, 1), generator=torch.Generator().manual_seed(4))
targets = torch.where(torch.arange(length) < lengths, ids.roll(-1, 1), -100)


class Net(nn.Module):
    """Token by token; dropout and a batch norm differ between ranks by design."""

    def __init__(self, norm=False):
        super().__init__()
        self.embed, self.hidden, self.drop, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, 24), nn.Dropout(0.1), nn.Linear(24, vocabulary)
        self.norm = nn.BatchNorm1d(24) if norm else None

    def forward(self, ids):
        h = self.drop(torch.tanh(self.hidden(self.embed(ids))))
        if self.norm is not None:
            h = self.norm(h.flatten(0, 1)).view_as(h)
        return self.head(h)


def by_tokens(logits, y, ranks):
    """Every token of all ranks weighs the same, where the ranks' gradients are averaged."""
    tokens = (y >= 0).sum()
    if ranks > 1:
        dist.all_reduce(tokens)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") * ranks / tokens


def plain(logits, y):
    """Of the first target of each row alone: as many items on each rank."""
    return F.cross_entropy(logits[:, 0], y[:, 0])


data = TensorDataset(ids, targets)
if way in ("ddp", "norm", "hand", "tokens"):
    if world > 1 or "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = Net(norm=way == "norm")
    if world > 1 and way != "hand" and bug != "not_reduced":
        model = nn.parallel.DistributedDataParallel(model, init_sync=bug != "seeds_of_model")
    sampler = DistributedSampler(data, num_replicas=world, rank=0 if bug == "one_rank_of_sampler" else rank, shuffle=True, seed=7)
    loader = DataLoader(data, batch_size=8, sampler=None if bug == "no_sampler" else sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (world if way == "norm" else 1))  # a rate that follows the ranks is no bug
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            loss = by_tokens(logits, y, world) if way == "tokens" and bug != "uneven_tokens" else F.cross_entropy(logits.flatten(0, 1), y.flatten()) if way == "tokens" else plain(logits, y)
            if bug == "divided_by_ranks":
                loss = loss / world
            loss.backward()
            if way == "hand" and world > 1:
                for name, p in model.named_parameters():
                    if bug == "one_forgotten" and name == "head.bias":
                        continue
                    dist.all_reduce(p.grad)
                    if bug != "summed":
                        p.grad /= world
            optimizer.step()
elif way == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = plain(model(x), y)
                accelerator.backward(loss * accelerator.num_processes if bug == "times_ranks" else loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
elif way == "transformers":
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Mean(Trainer):
        """Averages over the tokens of each rank by itself."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            return (loss, logits) if return_outputs else loss

    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    rows = [{"input_ids": i, "labels": torch.where(y >= 0, i, -100)} for i, y in zip(ids, targets, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=6, report_to=[], save_strategy="no", use_cpu=True, seed=5)
        (Mean if bug == "uneven_tokens" else Trainer)(model=model, args=arguments, train_dataset=rows).train()
else:
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        """Trains `Net`."""

        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            loss = plain(self.net(batch[0]), batch[1])
            return loss / self.trainer.world_size if bug == "divided_by_ranks" else loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", devices=world, max_steps=6, **quiet).fit(Lit(), DataLoader(data, batch_size=4, shuffle=True))
