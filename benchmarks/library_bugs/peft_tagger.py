"""Tags of tokens by an encoder of one's own with LoRA beside a head: trained, evaluated, saved and loaded. `--bug` plants a mistake that users of peft make.

Bugs: base_trains, optimizer_before_adapter, merged_for_evaluation, head_not_saved, optimizer_of_another_adapter, loaded_frozen, left_disabled, half_of_the_state, wrapped_state, merge_result_dropped, head_forgotten
"""
import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=24)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        heads = [f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Tagger(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(12, width), nn.Embedding(10, width)
        self.attention, self.norm = nn.ModuleList(Attention(width) for _ in range(2)), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 3)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for attention, norm in zip(self.attention, self.norm):
            x = norm(x + self.drop(attention(x)))
        return self.head(x)


ids = torch.randint(12, (400, 10))
tags = (ids + ids.roll(1, 1)) % 3
train, test = TensorDataset(ids[:320], tags[:320]), (ids[320:], tags[320:])
base = Tagger()
start = {name: value.clone() for name, value in base.state_dict().items()}
early = torch.optim.AdamW(base.parameters(), 1e-2) if args.bug == "optimizer_before_adapter" else None
by_hand = args.bug in ("head_not_saved", "head_forgotten")
config = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=None if by_hand else ["head"])
model = get_peft_model(base, config)
if args.bug == "base_trains":
    model.requires_grad_(True)
if args.bug == "head_not_saved":
    model.base_model.model.head.requires_grad_(True)


def evaluate():
    if args.bug == "merged_for_evaluation":
        model.merge_adapter()
    model.eval()
    with torch.no_grad():
        found = (model(test[0]).argmax(-1) == test[1]).float().mean().item()
    if args.bug == "left_disabled":
        model.base_model.disable_adapter_layers()
        model.base_model.model.head.requires_grad_(True)
    model.train()
    return found


def fit(updates, optimizer):
    model.train()
    done = 0
    while done < updates:
        for x, y in DataLoader(train, args.batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            done += 1
            if done % 6 == 0:
                print(done, loss.item(), evaluate(), flush=True)
            if done == updates:
                return


def trainable():
    return [p for p in model.parameters() if p.requires_grad]


optimizer = early or torch.optim.AdamW(trainable(), 1e-2)
if args.bug == "optimizer_of_another_adapter":
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["head"]))
    model.set_adapter("second")
fit(args.iters // 2, optimizer)
with tempfile.TemporaryDirectory() as folder:
    if args.bug in ("half_of_the_state", "wrapped_state"):
        state = get_peft_model_state_dict(model)
        if args.bug == "half_of_the_state":
            state = {name: value for name, value in state.items() if "lora_A" in name or "head" in name}
        else:
            state = {f"module.{name}": value for name, value in state.items()}
            state |= {name.removeprefix("module."): value for name, value in state.items() if "head" in name}
        torch.save(state, f"{folder}/adapter.pt")
        fresh = Tagger()
        fresh.load_state_dict(start)
        model = get_peft_model(fresh, config)
        set_peft_model_state_dict(model, torch.load(f"{folder}/adapter.pt"))
    else:
        if args.bug == "merge_result_dropped":
            model.merge_and_unload()
        model.save_pretrained(folder)
        fresh = Tagger()
        fresh.load_state_dict(start)
        if args.bug != "merge_result_dropped":
            name = f"{folder}/second" if args.bug == "optimizer_of_another_adapter" else folder
            model = PeftModel.from_pretrained(fresh, name, is_trainable=args.bug != "loaded_frozen")
        else:
            model = get_peft_model(fresh, config)
if args.bug in ("loaded_frozen", "head_not_saved"):
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "norm" in name if args.bug == "loaded_frozen" else p.requires_grad or "head" in name)
if args.bug == "base_trains":
    model.requires_grad_(True)
fit(args.iters - args.iters // 2, torch.optim.AdamW(trainable(), 1e-2))
print("end", evaluate())
