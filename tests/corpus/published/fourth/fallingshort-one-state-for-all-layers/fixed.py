import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class MultiLayerGRU(nn.Module):
    def __init__(self, vocabulary, width, num_layers):
        super().__init__()
        self.width = width
        self.num_layers = num_layers
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(num_layers))
        self.output_layer = nn.Linear(width, vocabulary)

    def init_state(self, batch):
        return [torch.zeros(batch, self.width) for _ in range(self.num_layers)]

    def step(self, token, hidden_state):
        x = self.embedding(token)
        kept = []
        for cell, state in zip(self.cells, hidden_state):
            x = cell(x, state)
            kept.append(x)
        return self.output_layer(x), kept

    def forward(self, tokens):
        state = self.init_state(len(tokens))
        logits = []
        for t in range(tokens.shape[1]):
            out, state = self.step(tokens[:, t], state)
            logits.append(out)
        return torch.stack(logits, 1)

    @torch.no_grad()
    def sample(self, batch, length, generator, temperature=1.0):
        state, token = self.init_state(batch), torch.zeros(batch, dtype=torch.long)
        words = []
        for _ in range(length):
            out, state = self.step(token, state)
            token = torch.multinomial(F.softmax(out / temperature, -1), 1, generator=generator).squeeze(1)
            words.append(token)
        return torch.stack(words, 1)


def sentences(count, length, generator):
    start = torch.randint(1, 10, (count, 1), generator=generator)
    jump = torch.randint(1, 3, (count, 1), generator=generator)
    return 1 + (start + jump * torch.arange(length)) % 13


def train_epoch(model, optimizer, generator, steps):
    model.train()
    losses = []
    for _ in range(steps):
        words = sentences(16, 9, generator)
        inputs = F.pad(words[:, :-1], (1, 0))
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = MultiLayerGRU(14, args.width, num_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    losses, samples = [], []
    for _ in range(args.epochs):
        losses += train_epoch(model, optimizer, generator, args.steps)
        model.eval()
        samples.append(model.sample(4, 9, torch.Generator().manual_seed(3)).float().mean().item())
    print("RESULT " + json.dumps({"losses": losses, "samples": samples}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
