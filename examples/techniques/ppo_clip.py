"""Proximal policy optimisation (PPO) of a thermostat with a continuous action.

Tricky: rollouts without gradients, then several epochs of shuffled minibatches over the same data, ended early when
the policy has moved too far; one network, one optimizer, three terms in the loss; the learning rate decays by hand.
`--iters` counts updates; `losses` is the mean cost of the rollout that an update belongs to.

Class: rl
"""
import argparse
import json
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Normal


class Rooms:
    """`count` rooms with outside temperature, inertia and a heater; the cost is discomfort plus energy."""

    def __init__(self, count):
        self.count = count
        self.reset()

    def reset(self):
        self.temperature = 12 + 6 * torch.rand(self.count)
        self.outside = 5 + 10 * torch.rand(self.count)
        return self.observe()

    def observe(self):
        return torch.stack([(self.temperature - 20) / 5, (self.outside - 10) / 5], 1)

    def step(self, power):
        power = power.clamp(0, 3)
        self.temperature = self.temperature + 0.1 * (self.outside - self.temperature) + power
        reward = -((self.temperature - 20) / 5).abs() - 0.05 * power
        return self.observe(), reward


class ActorCritic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean, self.value = nn.Linear(hidden, 1), nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.tensor(-0.5))
        nn.init.orthogonal_(self.mean.weight, 0.01)

    def forward(self, state):
        h = self.shared(state)
        return Normal(self.mean(h).squeeze(-1), self.log_std.exp()), self.value(h).squeeze(-1)


@dataclass
class Rollout:
    states: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    cost: float


@torch.no_grad()
def collect(env, model, steps, gamma=0.95, lam=0.9):
    state, rows = env.reset(), []
    for _ in range(steps):
        policy, value = model(state)
        action = policy.sample()
        after, reward = env.step(action)
        rows.append((state, action, policy.log_prob(action), value, reward))
        state = after
    states, actions, log_probs, values, rewards = (torch.stack(column) for column in zip(*rows))
    following = torch.cat([values[1:], model(state)[1][None]])
    delta, advantages, running = rewards + gamma * following - values, torch.zeros_like(values), 0.0
    for t in reversed(range(steps)):
        running = delta[t] + gamma * lam * running
        advantages[t] = running
    flat = [t.flatten(0, 1) for t in (states, actions, log_probs, advantages, advantages + values)]
    return Rollout(*flat, cost=-rewards.mean().item())


def update(model, optimizer, rollout, rows, clip=0.2):
    policy, value = model(rollout.states[rows])
    ratio = (policy.log_prob(rollout.actions[rows]) - rollout.log_probs[rows]).exp()
    advantage = rollout.advantages[rows]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    loss = -gain + 0.5 * (value - rollout.returns[rows]).square().mean() - 0.003 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return (ratio - 1 - ratio.log()).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=2, help="passes over one rollout")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env, model = Rooms(16), ActorCritic(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    costs = []
    while len(costs) < args.iters:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - len(costs) / args.iters)
        rollout, moved = collect(env, model, steps=16), 0.0
        for _ in range(args.epochs):
            for rows in torch.randperm(len(rollout.actions)).split(args.batch_size):
                if len(costs) < args.iters and moved < 0.05:
                    moved = update(model, optimizer, rollout, rows)
                    costs.append(rollout.cost)
        print(f"update {len(costs)} cost {rollout.cost:.4f} divergence {moved:.4f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": costs, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
