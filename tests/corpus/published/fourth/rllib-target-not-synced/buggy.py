import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs, width, outputs):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


class SACModule(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.setup()

    def setup(self):
        c = self.config
        self.pi = mlp(c["obs"], c["width"], 2 * c["act"])
        self.qf = mlp(c["obs"] + c["act"], c["width"], 1)
        self.qf_twin = mlp(c["obs"] + c["act"], c["width"], 1)
        self.target_qf = mlp(c["obs"] + c["act"], c["width"], 1)
        self.target_qf_twin = mlp(c["obs"] + c["act"], c["width"], 1)
        self.target_qf.requires_grad_(False)
        self.target_qf_twin.requires_grad_(False)

    def sample_action(self, obs, generator):
        mean, log_std = self.pi(obs).chunk(2, -1)
        log_std = log_std.clamp(-4, 1)
        noise = torch.randn(mean.shape, generator=generator)
        raw = mean + log_std.exp() * noise
        log_prob = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        log_prob = log_prob - (2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)
        return torch.tanh(raw), log_prob


class SACLearner:
    def __init__(self, module, config):
        self.module, self.config = module, config
        critics = [*module.qf.parameters(), *module.qf_twin.parameters()]
        self.critic_optimizer = torch.optim.Adam(critics, lr=config["lr"])
        self.actor_optimizer = torch.optim.Adam(module.pi.parameters(), lr=config["lr"])
        self.generator = torch.Generator().manual_seed(config["seed"] + 4)

    def compute_target(self, batch):
        m = self.module
        with torch.no_grad():
            action, log_prob = m.sample_action(batch["next_obs"], self.generator)
            pair = torch.cat([batch["next_obs"], action], -1)
            q = torch.min(m.target_qf(pair), m.target_qf_twin(pair)).squeeze(-1)
            return batch["reward"] + self.config["gamma"] * (1 - batch["done"]) * (q - self.config["alpha"] * log_prob)

    def update_critics(self, batch):
        target = self.compute_target(batch)
        pair = torch.cat([batch["obs"], batch["action"]], -1)
        loss = F.mse_loss(self.module.qf(pair).squeeze(-1), target) + F.mse_loss(self.module.qf_twin(pair).squeeze(-1), target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.item()

    def update_actor(self, batch):
        action, log_prob = self.module.sample_action(batch["obs"], self.generator)
        pair = torch.cat([batch["obs"], action], -1)
        q = torch.min(self.module.qf(pair), self.module.qf_twin(pair)).squeeze(-1)
        loss = (self.config["alpha"] * log_prob - q).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        return loss.item()

    @torch.no_grad()
    def update_targets(self):
        for name in ("qf", "qf_twin"):
            for t, p in zip(getattr(self.module, "target_" + name).parameters(), getattr(self.module, name).parameters()):
                t.mul_(1 - self.config["tau"]).add_(p, alpha=self.config["tau"])


def training_step(learner, generator):
    obs = torch.randn(24, 4, generator=generator)
    action = torch.rand(24, 2, generator=generator) * 2 - 1
    following = 0.8 * obs + 0.2 * torch.randn(24, 4, generator=generator)
    reward = -(action - obs[:, :2].tanh()).pow(2).sum(-1)
    done = (torch.rand(24, generator=generator) < 0.1).float()
    batch = {"obs": obs, "action": action, "next_obs": following, "reward": reward, "done": done}
    critic = learner.update_critics(batch)
    actor = learner.update_actor(batch)
    learner.update_targets()
    return critic, actor


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    config = {"obs": 4, "act": 2, "width": args.width, "lr": 3e-3, "gamma": 0.97, "tau": 0.02, "alpha": 0.1, "seed": args.seed}
    learner = SACLearner(SACModule(config), config)
    generator = torch.Generator().manual_seed(args.seed + 1)
    print("RESULT " + json.dumps({"losses": [training_step(learner, generator) for _ in range(args.steps)]}))
