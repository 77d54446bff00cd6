import argparse
import json

import torch
from torch import nn
from torch.distributions import Normal


class ValueNorm(nn.Module):
    def __init__(self, beta=0.9):
        super().__init__()
        self.beta = beta
        self.register_buffer("running_mean", torch.zeros(1))
        self.register_buffer("running_mean_sq", torch.zeros(1))
        self.register_buffer("debiasing_term", torch.zeros(()))

    def statistics(self):
        mean = self.running_mean / self.debiasing_term.clamp(min=1e-5)
        mean_sq = self.running_mean_sq / self.debiasing_term.clamp(min=1e-5)
        return mean, (mean_sq - mean**2).clamp(min=1e-2)

    @torch.no_grad()
    def update(self, x):
        self.running_mean.mul_(self.beta).add_(x.mean() * (1 - self.beta))
        self.running_mean_sq.mul_(self.beta).add_((x**2).mean() * (1 - self.beta))
        self.debiasing_term.mul_(self.beta).add_(1 - self.beta)

    def normalize(self, x):
        mean, var = self.statistics()
        return (x - mean) / var.sqrt()

    def denormalize(self, x):
        mean, var = self.statistics()
        return x * var.sqrt() + mean


class Actor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, width), nn.ReLU())
        self.mean = nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return Normal(self.mean(self.base(obs)), self.log_std.exp())


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, share_obs):
        return self.net(share_obs)


class RMAPPO:
    def __init__(self, args):
        self.actor, self.critic = Actor(args.width), Critic(args.width)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3, eps=1e-5)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=5e-3, eps=1e-5)
        self.value_normalizer = ValueNorm()
        self._use_popart = False
        self._use_valuenorm = True

    def ppo_update(self, b, advantages):
        distribution = self.actor(b["obs"])
        ratio = (distribution.log_prob(b["actions"]) - b["log_probs"]).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.actor_optimizer.zero_grad()
        (policy_loss - 0.01 * distribution.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(self.actor.parameters(), 10.0)
        self.actor_optimizer.step()
        self.value_normalizer.update(b["returns"])
        value_loss = nn.functional.huber_loss(self.critic(b["share_obs"]), self.value_normalizer.normalize(b["returns"]), delta=10.0)
        self.critic_optimizer.zero_grad()
        value_loss.backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), 10.0)
        self.critic_optimizer.step()
        return policy_loss.item(), value_loss.item()

    def train(self, b):
        if self._use_popart:
            advantages = b["returns"] - self.value_normalizer.denormalize(b["value_preds"])
        else:
            advantages = b["returns"] - b["value_preds"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
        return [self.ppo_update(b, advantages) for _ in range(3)]


@torch.no_grad()
def collect(trainer, generator, length=20, gamma=0.95):
    share_obs = torch.randn(length, 2, 8, generator=generator)
    obs = torch.stack([share_obs[:, 0, :4], share_obs[:, 1, 4:]], 1)
    distribution = trainer.actor(obs)
    actions = distribution.mean + distribution.stddev * torch.randn(distribution.mean.shape, generator=generator)
    reward = 10 - (actions - obs.sum(-1, keepdim=True)).pow(2).mean(1, keepdim=True).expand(-1, 2, -1)
    returns, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(length)):
        running = reward[t] + gamma * running
        returns[t] = running
    return {
        "obs": obs, "share_obs": share_obs, "actions": actions, "log_probs": distribution.log_prob(actions),
        "returns": returns, "value_preds": trainer.critic(share_obs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    trainer, generator = RMAPPO(args), torch.Generator().manual_seed(args.seed + 1)
    print("RESULT " + json.dumps({"losses": [trainer.train(collect(trainer, generator)) for _ in range(args.episodes)]}))
