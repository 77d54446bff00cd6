import argparse
import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LoRAConfig:
    r: int = 4
    alpha: int = 16
    dropout: float = 0.0
    attn_matrices: tuple = ("query", "value")


class LoRA(nn.Module):
    def __init__(self, inputs, outputs, config):
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(config.r, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, config.r))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        self.scaling = config.alpha / config.r
        self.dropout = nn.Dropout(config.dropout)

    def com(self, weights, added, scaling=None):
        if scaling is None:
            scaling = self.scaling
        return weights + added * scaling

    def forward(self, x):
        return self.dropout(x) @ self.lora_A.t() @ self.lora_B.t()


class LoRALinear(nn.Linear):
    def attach(self, config):
        self.loras = nn.ModuleDict({"task": LoRA(self.in_features, self.out_features, config)})

    def forward(self, x):
        result = F.linear(x, self.weight, self.bias)
        if hasattr(self, "loras"):
            lora = self.loras["task"]
            result = lora.com(result, lora(x))
        return result


class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (LoRALinear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.LayerNorm = nn.LayerNorm(width)

    def forward(self, x):
        attended = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.LayerNorm(x + self.output(attended))


class BertClassifier(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.encoder = nn.Sequential(SelfAttention(width), SelfAttention(width))
        self.classifier = nn.Linear(width, 3)

    def forward(self, input_ids):
        return self.classifier(self.encoder(self.embeddings(input_ids)).mean(1))

    def add_adapter(self, config):
        for layer in self.encoder:
            for name in config.attn_matrices:
                getattr(layer, name).attach(config)

    def train_adapter(self):
        for name, p in self.named_parameters():
            p.requires_grad_("lora" in name or "classifier" in name)


class AdapterTrainer:
    def __init__(self, model, lr, generator):
        self.model, self.generator = model, generator
        self.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)

    def compute_loss(self, inputs):
        return F.cross_entropy(self.model(inputs["input_ids"]), inputs["labels"])

    def get_batch(self):
        words = torch.randint(0, 15, (16, 8), generator=self.generator)
        counts = torch.stack([(words % 3 == k).sum(1) for k in range(3)], 1)
        return {"input_ids": words, "labels": counts.argmax(1)}

    def train(self, max_steps):
        log = []
        for _ in range(max_steps):
            self.model.train()
            loss = self.compute_loss(self.get_batch())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.model.zero_grad()
            log.append(loss.item())
        return log


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = BertClassifier(15, args.width)
    model.add_adapter(LoRAConfig())
    model.train_adapter()
    trainer = AdapterTrainer(model, 8e-3, torch.Generator().manual_seed(args.seed + 1))
    print("RESULT " + json.dumps({"losses": trainer.train(args.steps)}))
