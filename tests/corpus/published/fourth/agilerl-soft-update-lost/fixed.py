import argparse
import copy
import json

import torch
import torch.nn.functional as F
from torch import nn


class QNetwork(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(observations, width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions))

    def forward(self, x):
        return self.head(self.encoder(x))


class ReplayBuffer:
    def __init__(self, capacity, seed):
        self.capacity = capacity
        self.rows = []
        self.generator = torch.Generator().manual_seed(seed)

    def push(self, *row):
        self.rows.append(row)
        if len(self.rows) > self.capacity:
            self.rows.pop(0)

    def sample(self, count):
        index = torch.randint(0, len(self.rows), (count,), generator=self.generator).tolist()
        return [torch.stack(column) for column in zip(*(self.rows[i] for i in index))]


class DQN:
    def __init__(self, observations, actions, width, lr=2e-3, gamma=0.95, tau=0.1):
        self.gamma, self.tau = gamma, tau
        self.actor = QNetwork(observations, actions, width)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.param_vals = dict(self.actor.named_parameters())
        self.target_params = dict(self.actor_target.named_parameters())
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=lr)

    def act(self, observation, epsilon, generator):
        if torch.rand(1, generator=generator).item() < epsilon:
            return torch.randint(0, 3, (), generator=generator)
        with torch.no_grad():
            return self.actor(observation.unsqueeze(0)).argmax(1)[0]

    def soft_update(self):
        with torch.no_grad():
            for key, target in self.target_params.items():
                target.lerp_(self.param_vals[key], self.tau)

    def learn(self, experiences):
        observation, action, reward, following, done = experiences
        with torch.no_grad():
            best = self.actor(following).argmax(1, keepdim=True)
            bootstrap = self.actor_target(following).gather(1, best).squeeze(1)
            y = reward + self.gamma * bootstrap * (1 - done)
        q = self.actor(observation).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = F.mse_loss(q, y)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
        self.optimizer.step()
        self.soft_update()
        return loss.item()


def environment_step(state, action, generator):
    force = (action.item() - 1) * 0.5
    following = 0.9 * state + 0.1 * torch.randn(4, generator=generator)
    following[0] = following[0] + force
    reward = 1.0 - following[0].abs()
    done = (following[0].abs() > 1.5).float()
    return following, reward, done


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    agent = DQN(4, 3, args.width)
    memory = ReplayBuffer(500, args.seed + 2)
    state, losses = torch.randn(4, generator=generator), []
    for step in range(args.steps + 32):
        action = agent.act(state, 0.3, generator)
        following, reward, done = environment_step(state, action, generator)
        memory.push(state, action, reward, following, done)
        state = torch.randn(4, generator=generator) if done else following
        if step >= 32:
            losses.append(agent.learn(memory.sample(16)))
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
