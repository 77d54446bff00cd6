import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


CLASSES, KEEP, EACH = 4, 24, 4


class Memory(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(CLASSES, KEEP, width), dim=-1))
        self.register_buffer("ptr", torch.zeros(CLASSES, dtype=torch.long))

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys, labels):
        for lb in labels.unique().tolist():
            rows = keys[labels == lb][:EACH]
            at = int(self.ptr[lb])
            if at + len(rows) >= KEEP:
                self.queue[lb, -len(rows) :] = rows
                self.ptr[lb] = 0
            else:
                self.queue[lb, at : at + len(rows)] = rows
                self.ptr[lb] = (self.ptr[lb] + len(rows)) % KEEP


class Segmentor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.cls = nn.Conv2d(width, CLASSES, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x):
        h = self.backbone(x)
        return self.cls(h), F.normalize(self.proj(h), dim=1)


def contrast(anchors, labels, memory, temperature=0.2):
    logits = anchors @ memory.queue.flatten(0, 1).T / temperature
    positive = (labels[:, None] == torch.arange(CLASSES).repeat_interleave(KEEP)[None]).float()
    return -(positive * logits.log_softmax(1)).sum(1).div(KEEP).mean()


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model, memory = Segmentor(args.width), Memory(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(args.steps):
        truth = torch.randint(0, CLASSES, (4, 4, 4), generator=generator).repeat_interleave(2, 1).repeat_interleave(2, 2)
        images = colours[truth].permute(0, 3, 1, 2) + 0.3 * torch.randn(4, 3, 8, 8, generator=generator)
        logits, embedding = model(images)
        flat, labels = embedding.permute(0, 2, 3, 1).flatten(0, 2), truth.flatten()
        loss = F.cross_entropy(logits, truth) + 0.1 * contrast(flat, labels, memory)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.dequeue_and_enqueue(flat.detach(), labels)
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
