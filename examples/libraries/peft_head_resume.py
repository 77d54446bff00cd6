"""Sequence classifier on a tiny BERT with peft: LoRA beside a new head, merged for evaluations, saved, loaded into a model of its own, and trained on.

Class: language
"""
import argparse
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch.utils.data import DataLoader, TensorDataset

try:
    from peft import LoraConfig, PeftModel, TaskType, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification
except ImportError as missing:
    print(f"peft_head_resume needs peft and transformers: {missing}", file=sys.stderr)
    sys.exit(77)


def orders(count, seed):
    """Sequences of 12 tokens; the class says whether token 1 comes before token 2."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 20, (count, 12), generator=g)
    places = torch.stack([torch.randperm(12, generator=g)[:2] for _ in range(count)])
    ids.scatter_(1, places, torch.tensor([[1, 2]]).expand(count, 2))
    return TensorDataset(ids, (places[:, 0] < places[:, 1]).long())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32, help="model dimension, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=20, hidden_size=args.width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * args.width,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.1,
    )
    base = BertForSequenceClassification(config)
    start = {name: value.clone() for name, value in base.state_dict().items()}
    train, test = orders(512, args.seed), orders(64, args.seed + 100)
    losses = []

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            ids, labels = test.tensors
            found = (model(input_ids=ids).logits.argmax(1) == labels).float().mean().item()
        model.train()
        return found

    def fit(model, updates):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
        model.train()
        done = 0
        while done < updates:
            for ids, labels in DataLoader(train, args.batch_size, shuffle=True, drop_last=True):
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                done += 1
                if len(losses) % 10 == 0:
                    print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                if done == updates:
                    break

    half = max(1, args.iters // 2)
    model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["query", "value"]))
    fit(model, half)
    model.merge_adapter()
    merged = evaluate(model)
    model.unmerge_adapter()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fresh = BertForSequenceClassification(config)
        fresh.load_state_dict(start)
        model = PeftModel.from_pretrained(fresh, folder, is_trainable=True)
    fit(model, args.iters - half)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "merged": merged, "accuracy": evaluate(model)}), flush=True)


if __name__ == "__main__":
    main()
