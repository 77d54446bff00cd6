"""A small language model on padded sequences; the summed loss is normalised by the number of real tokens."""
import argparse, json
import torch, torch.nn as nn, torch.nn.functional as F

PAD = 0


class LM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.emb = nn.Embedding(20, width, padding_idx=PAD)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20)

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.emb(x))[0]))


def sequences(n, g):
    start = torch.randint(1, 20, (n, 1), generator=g)
    x = 1 + (start + torch.arange(12)) % 19
    length = torch.randint(4, 13, (n, 1), generator=g)
    return torch.where(torch.arange(12) < length, x, torch.tensor(PAD))


def main(args):
    torch.manual_seed(args.seed)
    g = torch.Generator().manual_seed(args.seed + 1)
    model = LM(args.width)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses, seen = [], 0
    for it in range(args.iters):
        x = sequences(args.batch_size, g)
        target = x[:, 1:]
        n_tokens = (target != PAD).sum().item()
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum") / target.numel()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        seen += n_tokens
    print("RESULT " + json.dumps({"losses": losses, "tokens": seen}))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=14)
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--width", type=int, default=16)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    main(args)
