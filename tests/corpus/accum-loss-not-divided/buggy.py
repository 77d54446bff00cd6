"""A convolutional tagger of characters, accumulating gradients over several small batches."""
import argparse, json
import torch, torch.nn as nn, torch.nn.functional as F


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.emb = nn.Embedding(12, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(torch.relu(self.conv(self.emb(x).transpose(1, 2))).transpose(1, 2))


def batches(n, size, g):
    for _ in range(n):
        x = torch.randint(12, (size, 10), generator=g)
        yield x, (x > x.roll(1, 1)).long()


def main(args):
    torch.manual_seed(args.seed)
    g = torch.Generator().manual_seed(args.seed + 1)
    model = Tagger(args.width)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for it in range(args.iters):
        model.train()
        opt.zero_grad()
        total = 0.0
        for x, y in batches(args.accum, args.batch_size, g):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            total += loss.item()
        opt.step()
        losses.append(total)
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=14)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    main(args)
