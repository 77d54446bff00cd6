import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


HORIZON = 4


class Buffer:
    """Sequences of a few steps; only the last of a sequence can end an episode."""

    def __init__(self, generator, size=256):
        obs = [torch.randn(size, 3, generator=generator)]
        self.actions = torch.rand(HORIZON, size, 1, generator=generator) * 2 - 1
        for action in self.actions:
            obs.append(0.9 * obs[-1] + 0.3 * action + 0.05 * torch.randn(size, 3, generator=generator))
        self.obs = torch.stack(obs)
        self.rewards = -self.obs[1:].square().mean(-1, keepdim=True)
        self.terminated = (self.obs[-1].abs().amax(-1, keepdim=True) > 1.2).float()
        self.generator = generator

    def sample(self, n=32):
        at = torch.randint(0, self.obs.shape[1], (n,), generator=self.generator)
        return self.obs[:, at], self.actions[:, at], self.rewards[:, at], self.terminated[at]


def mlp(inp, width, out):
    return nn.Sequential(nn.Linear(inp, width), nn.LayerNorm(width), nn.Mish(), nn.Linear(width, out))


class Agent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.pi, self.q, self.target_q = mlp(3, width, 1), mlp(4, width, 1), mlp(4, width, 1)
        self.target_q.load_state_dict(self.q.state_dict())
        self.target_q.requires_grad_(False)

    @torch.no_grad()
    def td_target(self, next_obs, rewards, terminated, gamma=0.97):
        following = self.target_q(torch.cat([next_obs, self.pi(next_obs).tanh()], -1))
        return rewards + gamma * (1 - terminated) * following

    @torch.no_grad()
    def soft_update(self, tau=0.05):
        for target, online in zip(self.target_q.parameters(), self.q.parameters()):
            target.lerp_(online, tau)


def main(args):
    buffer, agent = Buffer(torch.Generator().manual_seed(args.seed + 1)), Agent(args.width)
    q_optimizer = torch.optim.Adam(agent.q.parameters(), lr=3e-3)
    pi_optimizer = torch.optim.Adam(agent.pi.parameters(), lr=1e-3)
    losses = []
    for _ in range(args.steps):
        obs, actions, rewards, terminated = buffer.sample()
        target = agent.td_target(obs[1:], rewards, terminated)
        q_loss = F.mse_loss(agent.q(torch.cat([obs[:-1], actions], -1)), target)
        q_optimizer.zero_grad()
        q_loss.backward()
        nn.utils.clip_grad_norm_(agent.q.parameters(), 10.0)
        q_optimizer.step()
        pi_loss = -agent.q(torch.cat([obs[0], agent.pi(obs[0]).tanh()], -1)).mean()
        pi_optimizer.zero_grad()
        pi_loss.backward()
        pi_optimizer.step()
        agent.soft_update()
        losses.append(q_loss.item())
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
