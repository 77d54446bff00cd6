import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Pole:
    """Many small environments at once; an episode ends when a point leaves its range, and begins anew within the step."""

    def __init__(self, n, generator):
        self.n, self.generator = n, generator
        self.state = self.fresh()

    def fresh(self):
        return torch.rand(self.n, 2, generator=self.generator) * 0.4 - 0.2

    def step(self, action):
        push = action.float() * 2 - 1
        speed = self.state[:, 1] + 0.3 * push + 0.2 * torch.randn(self.n, generator=self.generator)
        place = self.state[:, 0] + 0.5 * speed
        done = place.abs() > 0.8
        after = torch.stack([place, 0.9 * speed], 1)
        self.state = torch.where(done[:, None], self.fresh(), after)
        return self.state, torch.where(done, -1.0, 0.2), done


class Agent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


def compute_gae(rewards, values, dones, next_value, next_done, gamma=0.95, lam=0.9):
    advantages, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        if t == len(rewards) - 1:
            nonterminal, following = 1.0 - next_done, next_value
        else:
            nonterminal, following = 1.0 - dones[t + 1], values[t + 1]
        delta = rewards[t] + gamma * following * nonterminal - values[t]
        last = delta + gamma * lam * nonterminal * last
        advantages[t] = last
    return advantages


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    env, agent = Pole(16, generator), Agent(args.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    obs, done = env.state, torch.zeros(16)
    losses = []
    for _ in range(args.steps // 2):
        kept, horizon = {k: [] for k in ("obs", "actions", "logps", "values")}, 12
        rewards, dones = torch.zeros(horizon, 16), torch.zeros(horizon, 16)
        for t in range(horizon):
            dones[t] = done
            with torch.no_grad():
                logp = agent.actor(obs).log_softmax(-1)
                action = torch.multinomial(logp.exp(), 1, generator=generator).squeeze(1)
                value = agent.critic(obs).squeeze(1)
            for key, part in zip(kept, (obs, action, logp.gather(1, action[:, None]).squeeze(1), value)):
                kept[key].append(part)
            obs, rewards[t], ended = env.step(action)
            done = ended.float()
            dones[t] = done
        values = torch.stack(kept["values"])
        with torch.no_grad():
            advantages = compute_gae(rewards, values, dones, agent.critic(obs).squeeze(1), done)
        returns = (advantages + values).flatten()
        flat = {k: torch.cat(v) for k, v in kept.items()}
        gain = advantages.flatten()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(2):
            logp = agent.actor(flat["obs"]).log_softmax(-1)
            ratio = (logp.gather(1, flat["actions"][:, None]).squeeze(1) - flat["logps"]).exp()
            policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            critic = F.mse_loss(agent.critic(flat["obs"]).squeeze(1), returns)
            entropy = -(logp.exp() * logp).sum(1).mean()
            loss = policy + 0.5 * critic - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
