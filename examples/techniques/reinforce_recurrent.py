"""REINFORCE with a recurrent policy: remember a cue through a corridor and turn the right way at its end.

Tricky: the loss is not a prediction error and has no lower bound; one backward pass through a whole episode of
actions, drawn from the policy itself; the baseline is a running mean in a buffer, not a network. A GRU cell in a
loop. `losses` is one minus the success rate of an iteration's episodes.

Class: rl
"""
import argparse
import json

import torch
import torch.nn as nn
from torch.distributions import Categorical


class TMaze:
    """A cue at the first step, a corridor, a junction: turn left or right as the cue said."""

    def __init__(self, corridor):
        self.corridor = corridor

    def episode(self, count):
        cue = torch.randint(0, 2, (count,))
        frames = torch.zeros(self.corridor + 1, count, 4)
        frames[0, torch.arange(count), cue] = 1
        frames[1:-1, :, 2] = 1
        frames[-1, :, 3] = 1
        return frames, cue

    @staticmethod
    def rewards(actions, cue):
        """Going on (action 2) in the corridor costs nothing, turning into a wall does."""
        bumps = (actions[:-1] != 2).float().mean(0)
        return (actions[-1] == cue).float() - 0.5 * bumps


class RecurrentPolicy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.cell = nn.GRUCell(4, hidden)
        self.logits = nn.Linear(hidden, 3)
        self.register_buffer("baseline", torch.tensor(0.0))

    def play(self, frames):
        h = torch.zeros(frames.shape[1], self.cell.hidden_size)
        actions, log_probs, entropy = [], [], 0.0
        for frame in frames:
            h = self.cell(frame, h)
            policy = Categorical(logits=self.logits(h))
            action = policy.sample()
            actions.append(action)
            log_probs.append(policy.log_prob(action))
            entropy = entropy + policy.entropy().mean() / len(frames)
        return torch.stack(actions), torch.stack(log_probs), entropy


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=64, help="episodes of one iteration")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--corridor", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    maze, policy = TMaze(args.corridor), RecurrentPolicy(args.hidden)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    losses, rewards = [], []
    policy.train()
    for it in range(1, args.iters + 1):
        frames, cue = maze.episode(args.batch_size)
        actions, log_probs, entropy = policy.play(frames)
        reward = maze.rewards(actions, cue)
        advantage = reward - policy.baseline
        loss = -(log_probs.sum(0) * advantage).mean() - 0.01 * entropy
        policy.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        policy.baseline.lerp_(reward.mean(), 0.1)
        losses.append(1 - (actions[-1] == cue).float().mean().item())
        rewards.append(reward.mean().item())
        if it % 20 == 0:
            print(f"iter {it} failures {losses[-1]:.3f} reward {rewards[-1]:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in policy.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "rewards": rewards}), flush=True)


if __name__ == "__main__":
    main()
