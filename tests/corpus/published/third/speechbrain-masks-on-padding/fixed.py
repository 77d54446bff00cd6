import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


def compute_mask_indices(shape, probability, generator, attention_mask=None):
    chosen = torch.rand(shape, generator=generator) < probability
    chosen[:, 0] = True
    return chosen if attention_mask is None else chosen & attention_mask


def sample_negatives(mask, count, generator, attention_mask):
    """For each masked frame of a row, other frames of the row."""
    row, _ = mask.nonzero(as_tuple=True)
    lengths = attention_mask.sum(1)[row]
    return row, (torch.rand(len(row), count, generator=generator) * lengths[:, None]).long()


class Wav2Vec2Pretrain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.extractor = nn.Conv1d(1, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)
        self.mask_emb = nn.Parameter(torch.rand(width))
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.project, self.target = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, wav, lengths, generator):
        features = self.norm(F.gelu(self.extractor(wav[:, None])).transpose(1, 2))
        attention_mask = torch.arange(features.shape[1])[None] < (lengths // 4)[:, None]
        mask = compute_mask_indices(features.shape[:2], 0.3, generator, attention_mask)
        hidden = self.encoder(torch.where(mask[..., None], self.mask_emb, features))[0]
        targets = self.target(features)
        row, negatives = sample_negatives(mask, 5, generator, attention_mask)
        candidates = torch.cat([targets[mask][:, None], targets[row[:, None], negatives]], 1)
        scores = F.cosine_similarity(self.project(hidden)[mask][:, None], candidates, dim=-1) / 0.1
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = Wav2Vec2Pretrain(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        lengths = torch.randint(40, 129, (6,), generator=generator)
        tone = torch.rand(6, 1, generator=generator) + 0.1
        wav = (tone * torch.arange(128)).sin() + 0.1 * torch.randn(6, 128, generator=generator)
        wav = wav * (torch.arange(128)[None] < lengths[:, None])
        loss = model(wav, lengths, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
