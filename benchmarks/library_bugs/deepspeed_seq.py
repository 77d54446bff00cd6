"""Sums of sequences with DeepSpeed's ZeRO, stage 2: two batches an update, a scheduler of torch, evaluations and a checkpoint. `--bug` plants a mistake that users of DeepSpeed make.

Bugs: step_twice, step_each_two, clears_each_batch, scheduler_by_hand, clips_by_hand, optimizer_by_hand, scheduler_not_handed_on, engine_stays_in_evaluation
"""
import argparse
import os
import tempfile

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
    os.environ.setdefault(name, value)
import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=24)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)


class Summer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.out, self.drop = nn.Embedding(10, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 10), nn.Dropout(0.1)

    def forward(self, ids):
        return self.out(self.drop(self.cell(self.words(ids))[0][:, -1]))


ids = torch.randint(10, (320, 4))
train, test = TensorDataset(ids[:256], ids[:256].sum(1) % 10), (ids[256:], ids[256:].sum(1) % 10)
model, judge = Summer(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iters)
config = {"train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
if args.bug != "clips_by_hand":
    config["gradient_clipping"] = 1.0
engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=None if args.bug == "scheduler_not_handed_on" else schedule)
engine.train()
micro = 0
while micro < 2 * args.iters:
    for inputs, targets in DataLoader(train, args.batch_size, shuffle=True, drop_last=True):
        if args.bug == "clears_each_batch":
            wrapped.zero_grad()
        loss = judge(engine(inputs), targets)
        engine.backward(loss)
        micro += 1
        if args.bug == "clips_by_hand":
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        if args.bug != "step_each_two" or micro % 2 == 0:
            engine.step()
        if args.bug == "step_twice":
            engine.step()
        if args.bug == "optimizer_by_hand":
            optimizer.step()
        if args.bug == "scheduler_by_hand" and micro % 2 == 0:
            schedule.step()
        if micro == 2 * args.iters:
            break
    engine.eval()
    with torch.no_grad():
        print(micro, loss.item(), (engine(test[0]).argmax(1) == test[1]).float().mean().item(), flush=True)
    if args.bug != "engine_stays_in_evaluation":
        engine.train()
with tempfile.TemporaryDirectory() as folder:
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
print("end", sum(p.abs().sum().item() for p in model.parameters()))
