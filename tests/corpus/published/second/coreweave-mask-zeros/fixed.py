import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

PAD, VOCAB = 0, 20


class Texts(torch.utils.data.Dataset):
    def __init__(self, seed, n=96, length=12):
        generator = torch.Generator().manual_seed(seed + 1)
        self.rows = []
        for _ in range(n):
            size = int(torch.randint(4, length + 1, (1,), generator=generator))
            ids = torch.randint(1, VOCAB, (size,), generator=generator)
            label = int((ids < VOCAB // 2).sum() * 2 > size)
            ids = F.pad(ids, (0, length - size), value=PAD)
            self.rows.append((ids, (ids != PAD).long(), label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, attention_mask, label = self.rows[i]
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": label}


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask):
        x = self.tokens(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = (1.0 - attention_mask[:, None, :].float()) * -1e4
        x = x + torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias, -1) @ v
        return self.head(self.norm(x)[:, 0])


def main(args):
    loader = torch.utils.data.DataLoader(Texts(args.seed), batch_size=16, shuffle=True)
    model = Classifier(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    while len(losses) < args.steps:
        for batch in loader:
            labels = batch.pop("labels")
            loss = F.cross_entropy(model(**batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
