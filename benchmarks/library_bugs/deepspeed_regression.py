"""Regression with DeepSpeed, no ZeRO: four batches an update, warmup and decay by the configuration. `--bug` plants a mistake that users of DeepSpeed make.

Bugs: step_twice, step_each_four, clears_each_batch, scheduler_by_hand, optimizer_by_hand, loss_divided_too, engine_stays_in_evaluation, part_left_out, model_clears_each_batch
"""
import argparse
import os

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
    os.environ.setdefault(name, value)
import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
x = torch.randn(640, 6)
data = TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3].sin())
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": args.iters + 1, "warmup_max_lr": 5e-3, "warmup_num_steps": 3, "warmup_type": "linear"}},
}
mine = list(net.parameters())[2 if args.bug == "part_left_out" else 0 :]
engine, optimizer, _, schedule = deepspeed.initialize(model=net, model_parameters=mine, config=config)


def evaluate():
    engine.eval()
    with torch.no_grad():
        found = F.mse_loss(engine(x[512:]), data.tensors[1][512:]).item()
    if args.bug != "engine_stays_in_evaluation":
        engine.train()
    return found


engine.train()
micro = 0
while engine.global_steps < args.iters:
    for inputs, targets in DataLoader(TensorDataset(*(t[:512] for t in data.tensors)), args.batch_size, shuffle=True, drop_last=True):
        if args.bug == "clears_each_batch":
            optimizer.zero_grad()
        if args.bug == "model_clears_each_batch":
            engine.zero_grad()
        loss = F.mse_loss(engine(inputs), targets)
        engine.backward(loss / 4 if args.bug == "loss_divided_too" else loss)
        micro += 1
        if args.bug != "step_each_four" or micro % 4 == 0:
            engine.step()
        if args.bug == "step_twice":
            engine.step()
        if args.bug == "optimizer_by_hand" and micro % 4 == 0:
            optimizer.step()
        if args.bug == "scheduler_by_hand" and micro % 4 == 0:
            schedule.step()
        if micro % 16 == 0:
            print(engine.global_steps, loss.item(), evaluate(), flush=True)
        if engine.global_steps >= args.iters or micro > 4 * args.iters:
            break
    if micro > 4 * args.iters:
        break
print("end", sum(p.abs().sum().item() for p in net.parameters()))
