"""Small GPT-2 with rank-stabilised LoRA, gradient checkpointing and two adapters in turn. `--bug` plants a mistake that users of peft make.

Bugs: base_trains, half_in_optimizer, no_input_gradients, merged_for_samples, second_not_active, norms_not_saved, inference_mode, left_disabled, optimizer_before_adapter
"""
import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=24)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
start = torch.randint(20, (256, 1))
counting = [(start + k * torch.arange(12)) % 20 for k in (1, 3)]
base = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
early = torch.optim.AdamW(base.parameters(), 5e-3)
if args.bug == "no_input_gradients":
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def config(rank):
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=8, use_rslora=True, lora_dropout=0.05, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, inference_mode=args.bug == "inference_mode")


model = get_peft_model(base, config(4), adapter_name="ones")
model.add_adapter("threes", config(2))
if args.bug == "norms_not_saved":
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "ln_" in name)


def groups():
    for name, p in model.named_parameters():
        if args.bug == "base_trains" or (args.bug == "inference_mode" and "ln_" in name) or (args.bug in ("left_disabled", "no_input_gradients") and "ln_f" in name):
            p.requires_grad_(True)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if args.bug == "half_in_optimizer":
        named = [(n, p) for n, p in named if "lora_A" in n]
    plain = [p for n, p in named if p.dim() > 1]
    return [{"params": plain, "weight_decay": 0.01}, {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0}]


def sample():
    model.eval()
    if args.bug == "merged_for_samples":
        model.merge_adapter()
        model.base_model.model.transformer.ln_f.requires_grad_(True)
    with torch.no_grad():
        ids = model.generate(input_ids=torch.zeros(1, 2, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0)
        with model.disable_adapter():
            plain = model(input_ids=ids, labels=ids).loss.item()
    if args.bug == "left_disabled":
        model.base_model.disable_adapter_layers()
        model.base_model.model.transformer.ln_f.requires_grad_(True)
    model.train()
    return plain


for turn, name in enumerate(("ones", "threes")):
    if not (turn and args.bug == "second_not_active"):
        model.set_adapter(name)
    if args.bug in ("inference_mode", "norms_not_saved"):
        for path, p in model.named_parameters():
            p.requires_grad_("ln_" in path or (p.requires_grad and args.bug != "inference_mode"))
    if turn and args.bug == "second_not_active":
        optimizer = torch.optim.AdamW([p for path, p in model.named_parameters() if "threes" in path], 5e-3)
    else:
        optimizer = early if args.bug == "optimizer_before_adapter" and not turn else torch.optim.AdamW(groups(), 5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, args.iters)
    done = 0
    model.train()
    while done < args.iters // 2:
        for ids in DataLoader(counting[turn], args.batch_size, shuffle=True, drop_last=True):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done % 5 == 0:
                print(name, done, loss.item(), sample(), flush=True)
            if done == args.iters // 2:
                break
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=[name])
print("end", sum(p.abs().sum().item() for p in model.parameters()))
