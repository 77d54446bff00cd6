"""Ordinary trainings with DeepSpeed, one a kind, all of them right.

Kinds: plain, three_batches, stage_1, stage_2, two_losses, two_backwards, own_clipping, torch_backward, unmanaged, one_cycle, frozen_part, skipped_batches, cleared_behind_the_step, two_engines, accelerated, adapters
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
parser.add_argument("--iters", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kind", default="plain")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
kind = args.kind
x = torch.randn(512, 6)
data = TensorDataset(x, (x[:, :1] - x[:, 1:2].cos()))
batches = {"three_batches": 3, "stage_2": 2, "unmanaged": 2, "one_cycle": 2, "two_losses": 2, "own_clipping": 2, "cleared_behind_the_step": 2}.get(kind, 1)
config = {
    "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": batches, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": {"stage_1": 1, "stage_2": 2, "torch_backward": 1, "unmanaged": 1, "two_losses": 1}.get(kind, 0)},
}  # fmt: skip
if kind == "one_cycle":
    config["scheduler"] = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}}
if kind == "unmanaged":
    config["managed_gradient_accumulation"] = False


def net():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))


def fit(engine, per_update=batches):
    engine.train()
    micro = 0
    while micro < args.iters * per_update:
        for inputs, targets in DataLoader(data, 8, shuffle=True, drop_last=True):
            if kind == "skipped_batches" and micro % 4 == 3:
                micro += 1
                continue  # nothing of this batch is used
            found = engine(inputs)
            loss = F.mse_loss(found, targets)
            if kind == "torch_backward":
                loss.backward()
            elif kind == "two_backwards":
                engine.backward(F.l1_loss(engine(inputs + 0.1), targets))
                engine.backward(loss)
            else:
                engine.backward(loss + (1e-3 * found.square().mean() if kind == "two_losses" else 0))
            micro += 1
            if kind == "own_clipping" and engine.is_gradient_accumulation_boundary():
                torch.nn.utils.clip_grad_norm_([p for p in engine.module.parameters() if p.requires_grad], 1.0)
            if kind != "unmanaged" or micro % 2 == 0:
                engine.step()
            if kind == "cleared_behind_the_step" and engine.was_step_applied():
                engine.zero_grad()
            if micro % 8 == 0:
                engine.eval()
                with torch.no_grad():
                    engine(x[:16])
                engine.train()
            if micro == args.iters * per_update:
                break
    print(kind, loss.item())


if kind == "accelerated":
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, 8, shuffle=True, drop_last=True), schedule)
    for step, (inputs, targets) in enumerate(loader):
        accelerator.backward(F.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == args.iters:
            break
else:
    model = net()
    if kind == "frozen_part":
        model[0].requires_grad_(False)
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"], modules_to_save=["4"]))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)
    fit(engine)
    if kind == "two_engines":
        second, *_ = deepspeed.initialize(model=(other := net()), model_parameters=other.parameters(), config=dict(config))
        fit(second)
