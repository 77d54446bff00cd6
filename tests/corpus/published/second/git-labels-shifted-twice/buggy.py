import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, IMAGE_TOKENS = 17, 2


def causal_lm_loss(logits, labels, vocab_size, shift_labels=None, ignore_index=-100):
    """Next-token loss; shifts the labels by itself unless they come as `shift_labels`."""
    if shift_labels is None:
        labels = F.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, vocab_size), shift_labels.view(-1), ignore_index=ignore_index)


class Captioner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image = nn.Linear(8, width * IMAGE_TOKENS)
        self.tokens = nn.Embedding(VOCAB, width)
        self.places = nn.Embedding(16, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, image, ids, labels=None):
        seen = self.image(image).view(len(image), IMAGE_TOKENS, -1)
        hidden = torch.cat([seen, self.tokens(ids)], 1)
        hidden = hidden + self.places(torch.arange(hidden.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        logits = self.head(self.norm(self.block(hidden, src_mask=mask)))
        shifted_logits = logits[:, IMAGE_TOKENS:-1, :].contiguous()
        labels = labels[:, 1:].contiguous()
        return causal_lm_loss(shifted_logits.view(-1, VOCAB), labels.view(-1), VOCAB)


def batch(generator, size=8, length=10):
    first = torch.randint(0, VOCAB, (size, 1), generator=generator)
    steps = torch.arange(length)
    ids = (first + 3 * steps) % VOCAB
    image = F.one_hot(first[:, 0] % 8, 8).float()
    return image, ids


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Captioner(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        image, ids = batch(generator)
        loss = model(image, ids, labels=ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
