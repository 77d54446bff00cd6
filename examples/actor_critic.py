"""Advantage actor-critic on a small balancing environment.

Separate actor and critic, each with its own optimizer (Adam and RMSprop), a Polyak-averaged target critic for the
bootstrap values, entropy bonus, several environments stepped together, and a no-grad rollout phase in every iteration.
One `--iters` is one update of both networks. `losses` is the critic's loss; `returns` the episodes' mean length.

Class: rl
"""
import argparse
import copy
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class Balance:
    """A vectorised stick on a cart: two actions push left or right; an episode ends when the stick falls over."""

    def __init__(self, count, seed, limit=100):
        self.count, self.limit = count, limit
        self.g = torch.Generator().manual_seed(seed)
        self.state = torch.zeros(count, 3)
        self.age = torch.zeros(count)
        self.finished = []
        self.reset(torch.ones(count, dtype=torch.bool))

    def reset(self, which):
        fresh = (torch.rand(self.count, 3, generator=self.g) - 0.5) * 0.2
        self.state = torch.where(which[:, None], fresh, self.state)
        self.age = torch.where(which, torch.zeros(()), self.age)

    def step(self, action):
        angle, speed, cart = self.state.unbind(1)
        push = (action.float() * 2 - 1) * 0.8
        speed = speed + 0.1 * (6 * torch.sin(angle) + push * torch.cos(angle) * 3 - 0.2 * cart)
        angle = angle + 0.1 * speed
        cart = cart * 0.95 + 0.1 * push
        self.state = torch.stack([angle, speed, cart], dim=1)
        self.age = self.age + 1
        done = (angle.abs() > 0.6) | (self.age >= self.limit)
        self.finished += self.age[done].tolist()
        reward = torch.where(angle.abs() > 0.6, -1.0, 0.1)
        self.reset(done)
        return self.state, reward, done.float()


def mlp(cin, hidden, cout):
    return nn.Sequential(nn.Linear(cin, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, cout))


@torch.no_grad()
def rollout(env, actor, length):
    states, actions, rewards, dones = [], [], [], []
    for _ in range(length):
        states.append(env.state)
        action = Categorical(logits=actor(env.state)).sample()
        _, reward, done = env.step(action)
        actions.append(action)
        rewards.append(reward)
        dones.append(done)
    return torch.stack(states), torch.stack(actions), torch.stack(rewards), torch.stack(dones), env.state


def discounted(rewards, dones, bootstrap, gamma):
    returns, running = [], bootstrap
    for reward, done in zip(reversed(rewards), reversed(dones)):
        running = reward + gamma * (1 - done) * running
        returns.append(running)
    return torch.stack(returns[::-1])


@torch.no_grad()
def soft_update(target, source, tau):
    for t, s in zip(target.parameters(), source.parameters()):
        t.lerp_(s, tau)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16, help="environments stepped together")
    parser.add_argument("--rollout", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--gamma", type=float, default=0.95)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env = Balance(args.batch_size, args.seed)
    actor, critic = mlp(3, args.hidden, 2), mlp(3, args.hidden, 1)
    target = copy.deepcopy(critic).requires_grad_(False)
    actor_optim = torch.optim.Adam(actor.parameters(), lr=args.lr)
    critic_optim = torch.optim.RMSprop(critic.parameters(), lr=args.lr)

    losses, returns = [], []
    for it in range(1, args.iters + 1):
        states, actions, rewards, dones, last = rollout(env, actor, args.rollout)
        with torch.no_grad():
            value_target = discounted(rewards, dones, target(last).squeeze(-1), args.gamma)

        values = critic(states).squeeze(-1)
        critic_loss = F.smooth_l1_loss(values, value_target)
        critic_optim.zero_grad()
        critic_loss.backward()
        critic_optim.step()

        advantage = value_target - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        policy = Categorical(logits=actor(states))
        actor_loss = -(policy.log_prob(actions) * advantage).mean() - 0.01 * policy.entropy().mean()
        actor_optim.zero_grad()
        actor_loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        actor_optim.step()

        soft_update(target, critic, tau=0.1)
        losses.append(critic_loss.item())
        if it % 10 == 0 or it == args.iters:
            recent, env.finished = env.finished, []
            if recent:
                returns.append(sum(recent) / len(recent))
                print(f"iter {it} critic {critic_loss.item():.4f} actor {actor_loss.item():.4f} episode length {returns[-1]:.1f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for net in (actor, critic) for p in net.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "returns": returns}), flush=True)


if __name__ == "__main__":
    main()
