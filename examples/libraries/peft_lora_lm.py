"""Causal language model on data/rhymes.txt: LoRA adapters of peft on a tiny, randomly initialised GPT-2 whose base is frozen.

Warmup per update, clipping, evaluation after each pass, the adapter saved alone and loaded back onto a base of its own, and merged in the end.

Class: language
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch.utils.data import DataLoader, TensorDataset

try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as missing:
    print(f"peft_lora_lm needs peft and transformers: {missing}", file=sys.stderr)
    sys.exit(77)

TEXT = Path(__file__).resolve().parents[1] / "data" / "rhymes.txt"


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=block, labels=block).loss.item() for block, in loader]
    model.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = TEXT.read_text()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[c] for c in text])
    split = int(0.9 * len(ids))
    train, test = (TensorDataset(part.unfold(0, 32, 16).clone()) for part in (ids[:split], ids[split:]))
    loader, test_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True), DataLoader(test, 16)

    config = GPT2Config(vocab_size=len(alphabet), n_positions=32, n_embd=args.width, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(config)
    start = {k: v.clone() for k, v in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 5))

    losses = []
    model.train()
    while len(losses) < args.iters:
        for block, in loader:
            optimizer.zero_grad()
            loss = model(input_ids=block, labels=block).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
        last = evaluate(model, test_loader)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fresh = GPT2LMHeadModel(config)
        fresh.load_state_dict(start)
        loaded = PeftModel.from_pretrained(fresh, folder)
        print(f"adapter loads back: {abs(evaluate(loaded, test_loader) - last) < 1e-5}", flush=True)
    print(f"merged: {abs(evaluate(model.merge_and_unload(), test_loader) - last) < 1e-3}", flush=True)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
