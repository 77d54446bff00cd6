import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(torch.randn(tags) * 0.1)
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, emissions, tags):
        gold = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        alpha = self.start + emissions[:, 0]
        for t in range(1, tags.shape[1]):
            gold = gold + self.transitions[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, dim=1) + emissions[:, t]
        return (torch.logsumexp(alpha, 1) - gold).mean()


class NERModel(nn.Module):
    def __init__(self, vocabulary, width, tags):
        super().__init__()
        self.bert = nn.ModuleDict({
            "embeddings": nn.Embedding(vocabulary, width),
            "encoder": nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True),
        })
        self.encoder_conv = nn.Conv1d(2, width, 3, padding=1)
        self.fc = nn.Linear(width, tags)
        self.crf = CRF(tags)

    def forward(self, words, regions, tags):
        hidden = self.bert["encoder"](self.bert["embeddings"](words))
        hidden = hidden + self.encoder_conv(regions).mean(2).unsqueeze(1)
        return self.crf(self.fc(hidden), tags)


class NERTrainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args
        self.optimizer = self.configure_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: min(1.0, (k + 1) / 4))

    def configure_optimizer(self):
        parameters = []
        params = {"lr": 2e-3, "weight_decay": 1e-2}
        params["params"] = [p for n, p in self.model.named_parameters() if "bert" in n]
        parameters.append(params)

        params = {"lr": 4e-3, "weight_decay": 1e-2}
        params["params"] = [p for n, p in self.model.named_parameters() if "encoder_conv" in n]
        parameters.append(params)

        params = {"lr": 2e-2, "weight_decay": 1e-2}
        params["params"] = [p for n, p in self.model.named_parameters() if n.startswith(("crf", "fc"))]
        parameters.append(params)
        return torch.optim.AdamW(parameters)

    def train(self, batches):
        self.model.train()
        losses = []
        for words, regions, tags in batches:
            loss = self.model(words, regions, tags)
            self.model.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def batches(args):
    g = torch.Generator().manual_seed(args.seed + 1)
    for _ in range(args.steps):
        words = torch.randint(0, 20, (8, 7), generator=g)
        regions = torch.randn(8, 2, 9, generator=g)
        yield words, regions, (words + words.roll(1, 1)) % 4


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    trainer = NERTrainer(NERModel(20, args.width, 4), args)
    print("RESULT " + json.dumps({"losses": trainer.train(batches(args))}))
