"""Deep Q-learning with a replay buffer and a target network that is copied every few updates, on a windy grid.

Tricky: many environment steps pass before the first update and between updates; targets come from a second network
under `no_grad`, which stands still and then jumps to the online weights; rewards are sparse, exploration decays.
`--iters` counts updates; `losses` is the temporal-difference error.

Class: rl
"""
import argparse
import copy
import json
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class WindyGrid:
    """A 5x5 grid; the wind pushes up in two columns; the goal is the far corner."""

    size, moves = 5, ((0, 1), (0, -1), (1, 0), (-1, 0))

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def reset(self):
        self.row, self.column, self.age = self.rng.randrange(self.size), 0, 0
        return self.observe()

    def observe(self):
        state = torch.zeros(2, self.size)
        state[0, self.row] = state[1, self.column] = 1
        return state.flatten()

    def step(self, action):
        down, right = self.moves[action]
        wind = -1 if self.column in (2, 3) and self.rng.random() < 0.3 else 0
        self.row = min(max(self.row + down + wind, 0), self.size - 1)
        self.column = min(max(self.column + right, 0), self.size - 1)
        self.age += 1
        won = (self.row, self.column) == (self.size - 1, self.size - 1)
        return self.observe(), 1.0 if won else -0.02, won or self.age == 30


class DuelingQ(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, 4)

    def forward(self, state):
        h = self.trunk(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(-1, keepdim=True)


class Agent:
    def __init__(self, args):
        self.args = args
        self.rng = random.Random(args.seed)
        self.env, self.replay = WindyGrid(self.rng), deque(maxlen=2000)
        self.online = DuelingQ(args.hidden)
        self.target = copy.deepcopy(self.online).eval()
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=args.lr)
        self.state, self.episode, self.returns = self.env.reset(), 0.0, []

    def act(self, epsilon):
        if self.rng.random() < epsilon:
            return self.rng.randrange(4)
        with torch.no_grad():
            return int(self.online(self.state).argmax())

    def interact(self, steps, epsilon):
        for _ in range(steps):
            action = self.act(epsilon)
            after, reward, done = self.env.step(action)
            self.replay.append((self.state, action, reward, after, float(done)))
            self.episode += reward
            if done:
                self.returns.append(self.episode)
                self.episode = 0.0
            self.state = self.env.reset() if done else after

    def update(self):
        state, action, reward, after, done = zip(*self.rng.sample(self.replay, self.args.batch_size))
        state, after = torch.stack(state), torch.stack(after)
        with torch.no_grad():
            best = self.online(after).argmax(1, keepdim=True)                     # double Q-learning
            future = self.target(after).gather(1, best).squeeze(1)
            wanted = torch.tensor(reward) + 0.95 * (1 - torch.tensor(done)) * future
        q = self.online(state).gather(1, torch.tensor(action)[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.online.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--copy-every", type=int, default=8, help="updates between two copies to the target network")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    agent = Agent(args)
    agent.interact(max(200, args.batch_size), epsilon=1.0)
    losses = []
    for it in range(1, args.iters + 1):
        agent.interact(8, epsilon=max(0.1, 1 - it / args.iters))
        losses.append(agent.update())
        if it % args.copy_every == 0:
            agent.target.load_state_dict(agent.online.state_dict())
        if it % 20 == 0:
            recent = agent.returns[-10:]
            print(f"iter {it} loss {losses[-1]:.4f} return {sum(recent) / len(recent):.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in agent.online.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "returns": agent.returns}), flush=True)


if __name__ == "__main__":
    main()
