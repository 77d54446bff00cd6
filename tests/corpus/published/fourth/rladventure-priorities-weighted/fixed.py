import argparse
import json
from collections import deque

import numpy as np
import torch
import torch.nn as nn


class PrioritizedReplayBuffer:
    def __init__(self, capacity, seed, prob_alpha=0.6):
        self.prob_alpha = prob_alpha
        self.buffer = deque(maxlen=capacity)
        self.priorities = np.zeros((capacity,), dtype=np.float32)
        self.random = np.random.RandomState(seed)
        self.pos, self.capacity = 0, capacity

    def push(self, *transition):
        largest = self.priorities.max() if self.buffer else 1.0
        self.buffer.append(transition)
        self.priorities[self.pos] = largest
        self.pos = (self.pos + 1) % self.capacity

    def sample(self, batch_size, beta=0.4):
        prios = self.priorities[: len(self.buffer)]
        probs = prios**self.prob_alpha
        probs = probs / probs.sum()
        indices = self.random.choice(len(self.buffer), batch_size, p=probs)
        weights = (len(self.buffer) * probs[indices]) ** (-beta)
        weights = torch.tensor(weights / weights.max(), dtype=torch.float32)
        state, action, reward, following, done = zip(*(self.buffer[i] for i in indices))
        stacked = [torch.tensor(np.stack(x), dtype=torch.float32) for x in (state, reward, following, done)]
        return stacked[0], torch.tensor(action), stacked[1], stacked[2], stacked[3], indices, weights

    def update_priorities(self, batch_indices, batch_priorities):
        for idx, prio in zip(batch_indices, batch_priorities):
            self.priorities[idx] = prio


def build(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def compute_td_loss(batch_size, beta, current, target, optimizer, replay, gamma=0.9):
    state, action, reward, following, done, indices, weights = replay.sample(batch_size, beta)
    q_value = current(state).gather(1, action.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        expected = reward + gamma * target(following).max(1)[0] * (1 - done)
    loss = (q_value - expected).pow(2) * weights
    prios = (q_value - expected).detach().abs() + 1e-5
    loss = loss.mean()
    optimizer.zero_grad()
    loss.backward()
    replay.update_priorities(indices, prios.numpy())
    optimizer.step()
    return loss.item()


parser = argparse.ArgumentParser()
parser.add_argument("--frames", type=int, default=70)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)

random = np.random.RandomState(args.seed + 1)
current_model, target_model = build(args.width), build(args.width)
target_model.load_state_dict(current_model.state_dict())
optimizer = torch.optim.Adam(current_model.parameters(), lr=2e-3)
replay_buffer = PrioritizedReplayBuffer(64, args.seed + 2)

losses = []
state = random.normal(size=4)
for frame in range(1, args.frames + 1):
    epsilon = 0.1 + 0.9 * np.exp(-frame / 30)
    if random.rand() < epsilon:
        action = int(random.randint(2))
    else:
        with torch.no_grad():
            action = int(current_model(torch.tensor(state, dtype=torch.float32)).argmax())
    following = 0.85 * state + random.normal(size=4) * 0.2
    following[0] += 0.4 if action else -0.4
    reward, done = 1.0 - abs(following[0]) + 3.0 * (following[1] > 0.6), float(abs(following[0]) > 1.2)
    replay_buffer.push(state, action, reward, following, done)
    state = random.normal(size=4) if done else following
    if len(replay_buffer.buffer) > 32:
        losses.append(compute_td_loss(16, min(1.0, 0.4 + frame * 0.01), current_model, target_model, optimizer, replay_buffer))
    if frame % 10 == 0:
        target_model.load_state_dict(current_model.state_dict())
print("RESULT " + json.dumps({"losses": losses}))
