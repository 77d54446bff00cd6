import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class TextDataset(torch.utils.data.IterableDataset):
    def __init__(self, documents, infinite=True):
        self.original = documents
        self.documents = documents
        self.infinite = infinite
        self.epoch = 0

    def __iter__(self):
        while True:
            for ids in self.documents:
                yield ids[:-1], ids[1:]
            if not self.infinite:
                break
            self.epoch += 1
            order = torch.randperm(len(self.original), generator=torch.Generator().manual_seed(42 + self.epoch))
            self.documents = self.original[order]


class Decoder(nn.Module):
    def __init__(self, width, vocab=19):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.output(self.norm(h))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    first, stride = torch.randint(0, 19, (24, 1), generator=generator), torch.randint(1, 5, (24, 1), generator=generator)
    documents = (first + stride * torch.arange(11)) % 19
    loader = iter(torch.utils.data.DataLoader(TextDataset(documents), batch_size=4))
    model = Decoder(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for _ in range(args.steps):
        ids, labels = next(loader)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
