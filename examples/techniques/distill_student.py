"""Distil a bidirectional LSTM teacher into a bag-of-embeddings student on generated topic sentences.

Tricky: two trainings in one process with different models and optimizers; in the second, the teacher stays in eval
mode, frozen, and its soft targets come from `no_grad`. `--iters` counts the student's steps.

Class: language
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, TOPICS, LENGTH = 60, 5, 14


class Teacher(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(2 * hidden, TOPICS)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        return self.out(self.dropout(states.max(1).values))


class Student(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, hidden, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, TOPICS))

    def forward(self, tokens):
        return self.mlp(self.bag(tokens))


def sentences(count, generator):
    """Each topic prefers its own twelfth of the vocabulary."""
    topics = torch.randint(0, TOPICS, (count,), generator=generator)
    own = topics[:, None] * 12 + torch.randint(0, 12, (count, LENGTH), generator=generator)
    anything = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    keep = torch.rand(count, LENGTH, generator=generator) < 0.35
    return torch.where(keep, own, anything), topics


def train_teacher(teacher, steps, batch_size, generator):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    teacher.train()
    for _ in range(steps):
        tokens, topics = sentences(batch_size, generator)
        loss = F.cross_entropy(teacher(tokens), topics, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"teacher loss {loss.item():.4f} after {steps} steps", flush=True)
    return teacher.eval().requires_grad_(False)


def distillation_loss(student_logits, teacher_logits, labels, temperature, alpha):
    soft = F.kl_div(
        F.log_softmax(student_logits / temperature, -1), F.log_softmax(teacher_logits / temperature, -1),
        reduction="batchmean", log_target=True,
    )
    return alpha * temperature ** 2 * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32, help="of the teacher; the student has half")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--teacher-iters", type=int, default=30)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    teacher = train_teacher(Teacher(args.hidden), args.teacher_iters, args.batch_size, generator)
    student = Student(args.hidden // 2)
    optimizer = torch.optim.RMSprop(student.parameters(), lr=args.lr, momentum=0.5)

    losses = []
    student.train()
    for it in range(1, args.iters + 1):
        tokens, topics = sentences(args.batch_size, generator)
        with torch.no_grad():
            targets = teacher(tokens)
        optimizer.zero_grad()
        loss = distillation_loss(student(tokens), targets, topics, temperature=2.0, alpha=0.7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if it % 10 == 0:
            print(f"iter {it} loss {losses[-1]:.4f}", flush=True)

    student.eval()
    tokens, topics = sentences(400, generator)
    with torch.no_grad():
        nets = {"teacher": teacher, "student": student}
        scores = {name: (net(tokens).argmax(1) == topics).float().mean().item() for name, net in nets.items()}
    param_sum = sum(p.detach().double().abs().sum().item() for p in student.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, **scores}), flush=True)


if __name__ == "__main__":
    main()
