import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


VOCAB, PAD = 19, 0


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids))[0])


def distillation_loss(student, teacher, labels, temperature=2.0, alpha=0.5):
    task = F.cross_entropy(student.flatten(0, 1), labels.flatten(), ignore_index=-100)
    kept = (labels != -100).flatten()
    gap = F.kl_div((student / temperature).log_softmax(-1).flatten(0, 1)[kept], (teacher / temperature).softmax(-1).flatten(0, 1)[kept], reduction="batchmean")
    return alpha * task + (1 - alpha) * temperature**2 * gap


def collate(generator):
    ids = 1 + (torch.randint(0, VOCAB - 1, (8, 1), generator=generator) + 2 * torch.arange(13)) % (VOCAB - 1)
    lengths = torch.randint(3, 14, (8, 1), generator=generator)
    attention_mask = torch.arange(13)[None] < lengths
    return {"input_ids": ids.where(attention_mask, PAD), "attention_mask": attention_mask}


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    teacher, student = Model(2 * args.width, 2), Model(args.width, 1)
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3)
    losses = []
    for _ in range(args.steps):
        inputs = collate(generator)
        labels = inputs["input_ids"].clone()
        labels[~inputs["attention_mask"]] = -100
        with torch.no_grad():
            guide = teacher(inputs["input_ids"][:, :-1])
        loss = distillation_loss(student(inputs["input_ids"][:, :-1]), guide, labels[:, 1:])
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
