"""Classify rings of points: two LoRA adapters of peft on one frozen perceptron, trained in turn, and a new head of each (`modules_to_save`).

The base is trained first, without peft, on another task. Each adapter has an optimizer of its own; the other one's weights must not move meanwhile.

Class: tabular
"""
import argparse
import json
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from peft import LoraConfig, get_peft_model
except ImportError as missing:
    print(f"peft_adapter_switch needs peft: {missing}", file=sys.stderr)
    sys.exit(77)


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Dropout(0.05), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.head(self.body(x))


def rings(count, width, seed):
    """Points; the class says whether the ring that a point lies in is an odd one."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)) * 2
    return TensorDataset(x, (x.norm(dim=1) / width).long() % 2)


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        x, y = data.tensors
        found = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net, losses = Net(args.hidden), []

    def train(model, data, parameters, updates):
        optimizer = torch.optim.AdamW(parameters, lr=args.lr)
        done = 0
        while done < updates:
            for x, y in DataLoader(data, args.batch_size, shuffle=True, drop_last=True):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                done += 1
                if len(losses) % 10 == 0:
                    print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                if done == updates:
                    break
        return accuracy(model, data)

    third = max(1, args.iters // 3)
    train(net, rings(512, 2.0, args.seed), net.parameters(), third)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["body.0", "body.3"], modules_to_save=["head"])
    model = get_peft_model(net, config, adapter_name="narrow")
    model.add_adapter("wide", LoraConfig(r=4, lora_alpha=8, target_modules=["body.0", "body.3"], modules_to_save=["head"]))
    found = []
    for name, width, updates in (("narrow", 1.0, third), ("wide", 3.0, args.iters - 2 * third)):
        model.set_adapter(name)
        held = [p for n, p in model.named_parameters() if p.requires_grad]
        found.append(train(model, rings(512, width, args.seed + 1), held, updates))
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": found}), flush=True)


if __name__ == "__main__":
    main()
