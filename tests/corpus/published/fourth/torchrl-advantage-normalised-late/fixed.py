import argparse
import json

import torch
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observations, width), nn.Tanh())
        self.policy = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


class ClipPPOLoss(nn.Module):
    def __init__(self, actor_critic, clip_epsilon=0.2, entropy_coef=0.01, critic_coef=0.5, normalize_advantage=True):
        super().__init__()
        self.actor_critic = actor_critic
        self.clip_epsilon = clip_epsilon
        self.entropy_coef = entropy_coef
        self.critic_coef = critic_coef
        self.normalize_advantage = normalize_advantage

    def forward(self, data):
        advantage = data["advantage"]
        distribution, value = self.actor_critic(data["observation"])
        if self.normalize_advantage and advantage.numel() > 1:
            advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-6)
        log_weight = distribution.log_prob(data["action"]) - data["log_prob"]
        gain1 = log_weight.exp() * advantage
        clipped = log_weight.clamp(-self.clip_epsilon, self.clip_epsilon)
        gain2 = clipped.exp() * advantage
        gain = torch.stack([gain1, gain2], -1).min(dim=-1)[0]
        return {
            "loss_objective": -gain.mean(),
            "loss_entropy": -self.entropy_coef * distribution.entropy().mean(),
            "loss_critic": self.critic_coef * (value - data["return"]).pow(2).mean(),
        }


@torch.no_grad()
def collect(model, frames, generator, gamma=0.9):
    observation = torch.randn(frames, 5, generator=generator)
    distribution, value = model(observation)
    noise = torch.rand(distribution.logits.shape, generator=generator)
    action = (distribution.logits - (-noise.log()).log()).argmax(-1)
    reward = 4 * (action == observation[:, :3].argmax(-1)).float() - 1.5
    returns, running = torch.zeros(frames), 0.0
    for t in reversed(range(frames)):
        running = reward[t] + gamma * running * (0.0 if t % 8 == 7 else 1.0)
        returns[t] = running
    return {
        "observation": observation, "action": action, "log_prob": distribution.log_prob(action),
        "advantage": returns - value, "return": returns,
    }


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = ActorCritic(5, 3, args.width)
    loss_module = ClipPPOLoss(model)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
    history = []
    for _ in range(args.iterations):
        data = collect(model, 64, generator)
        for _ in range(args.epochs):
            order = torch.randperm(64, generator=generator)
            for chunk in order.split(32):
                batch = {key: value[chunk] for key, value in data.items()}
                losses = loss_module(batch)
                loss = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                history.append(loss.item())
    print("RESULT " + json.dumps({"losses": history}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
