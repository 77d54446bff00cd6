import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def token_log_probs(logits, tokens):
    return F.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def rollout(policy, generator, count=16, length=8, vocabulary=12):
    tokens = torch.randint(1, vocabulary, (count, length + 1), generator=generator)
    lengths = torch.randint(2, length + 1, (count,), generator=generator)
    mask = (torch.arange(length) < lengths.unsqueeze(1)).float()
    tokens[:, 1:] = tokens[:, 1:] * mask.long()
    good = ((tokens[:, 1:] % 3 == 0).float() * mask).sum(1) / lengths
    return {
        "tokens": tokens,
        "response_mask": mask,
        "rewards": good + 0.5,
        "old": token_log_probs(policy(tokens[:, :-1]), tokens[:, 1:]),
    }


@torch.no_grad()
def compute_advantages(data, gamma=0.98):
    mask = data["response_mask"]
    steps_left = mask.flip(1).cumsum(1).flip(1) - 1
    data["advantages"] = data["rewards"].unsqueeze(1) * gamma ** steps_left.clamp_min(0) * mask
    return data


@torch.no_grad()
def normalize_advantages(data):
    advantages = data["advantages"]
    response_mask = data["response_mask"]
    num_actions = response_mask.sum()
    mean = advantages.mean()
    std = ((advantages - mean).pow(2) * response_mask).sum()
    rstd = (std / num_actions).clamp(min=1e-8).rsqrt()
    data["advantages"] = (advantages - mean) * rstd
    return data


def policy_loss(policy, data, clip=0.2):
    log_probs = token_log_probs(policy(data["tokens"][:, :-1]), data["tokens"][:, 1:])
    ratio = (log_probs - data["old"]).exp()
    surrogate = torch.min(ratio * data["advantages"], ratio.clamp(1 - clip, 1 + clip) * data["advantages"])
    mask = data["response_mask"]
    return -(surrogate * mask).sum() / mask.sum()


class PolicyTrainer:
    def __init__(self, args):
        self.args = args
        self.policy = Policy(12, args.width)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=5e-3, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(args.seed + 1)

    def train(self):
        losses = []
        for _ in range(self.args.steps):
            data = normalize_advantages(compute_advantages(rollout(self.policy, self.generator)))
            for _ in range(2):
                loss = policy_loss(self.policy, data)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                self.optimizer.step()
                losses.append(loss.item())
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    print("RESULT " + json.dumps({"losses": PolicyTrainer(args).train()}))
