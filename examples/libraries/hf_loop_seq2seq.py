"""Sequence-to-sequence with a tiny T5 of transformers in a plain loop: sort the digits of a number.

Labels padded with -100, the decoder's inputs shifted by the model itself, AdamW with two groups,
`get_linear_schedule_with_warmup`, clipping, greedy `generate` on held-out rows at the end.

Class: language
"""
import argparse
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch.utils.data import DataLoader, Dataset

try:
    from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup
except ImportError as missing:
    print(f"hf_loop_seq2seq needs transformers: {missing}", file=sys.stderr)
    sys.exit(77)

PAD, EOS, FIRST = 0, 1, 2                      # the digit d has the id FIRST + d


class SortDigits(Dataset):
    def __init__(self, count, longest, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, longest + 1, (count,), generator=g)
        self.rows = [torch.randint(0, 6, (int(n),), generator=g) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i] + FIRST, self.rows[i].sort().values + FIRST


def collate(pairs):
    end = torch.tensor([EOS])
    sources = torch.nn.utils.rnn.pad_sequence([torch.cat([s, end]) for s, _ in pairs], True, PAD)
    labels = torch.nn.utils.rnn.pad_sequence([torch.cat([t, end]) for _, t in pairs], True, -100)
    return {"input_ids": sources, "attention_mask": (sources != PAD).long(), "labels": labels}


def parameter_groups(model, decay):
    plain = [p for name, p in model.named_parameters() if "layer_norm" in name]
    decayed = [p for name, p in model.named_parameters() if "layer_norm" not in name]
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def exact_match(model, loader, longest):
    model.eval()
    hits = total = 0
    for batch in loader:
        produced = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=longest + 1,
                                  do_sample=False, num_beams=1)[:, 1:]
        for row, label in zip(produced.tolist(), batch["labels"].tolist()):
            wanted = [t for t in label if t != -100]
            hits += row[:len(wanted)] == wanted
            total += 1
    return hits / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    loader = DataLoader(SortDigits(480, 6, args.seed), args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    held_out = DataLoader(SortDigits(48, 6, args.seed + 1), 24, collate_fn=collate)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=FIRST + 6, d_model=args.width, d_kv=args.width // 4, d_ff=2 * args.width, num_layers=2, num_heads=4,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD, dropout_rate=0.05,
        relative_attention_num_buckets=8,
    ))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, max(1, args.iters // 10), args.iters)

    losses = []
    model.train()
    while len(losses) < args.iters:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f} lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
            if len(losses) == args.iters:
                break

    accuracy = exact_match(model, held_out, 6)
    print(f"exact match of generated rows {accuracy:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "exact_match": accuracy}), flush=True)


if __name__ == "__main__":
    main()
