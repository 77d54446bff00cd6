"""Wasserstein GAN with weight clipping that generates damped oscillations.

Tricky: several critic updates for one generator update, weights of the critic clamped in place after each of its
steps, a loss without a bound below, RMSprop. `--iters` counts generator updates; `losses` is the distance between
the mean waves, real and generated.

Class: generative
"""
import argparse
import json

import torch
from torch import nn, optim


class Generator(nn.Module):
    def __init__(self, noise, hidden, length):
        super().__init__()
        self.fc = nn.Linear(noise, hidden * length // 4)
        self.hidden = hidden
        self.deconv = nn.Sequential(
            nn.ConvTranspose1d(hidden, hidden, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose1d(hidden, 1, 4, stride=2, padding=1), nn.Tanh(),
        )

    def forward(self, z):
        return self.deconv(torch.relu(self.fc(z)).view(len(z), self.hidden, -1))


class Critic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, hidden, 5, stride=2, padding=2), nn.LeakyReLU(0.2),
            nn.Conv1d(hidden, hidden, 5, stride=2, padding=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1),
        )

    def forward(self, wave):
        return self.net(wave)


class WGAN:
    def __init__(self, args, length=32):
        self.args, self.length = args, length
        self.generator = Generator(8, args.hidden, length)
        self.critic = Critic(args.hidden)
        self.critic(torch.zeros(1, 1, length))                       # sizes the lazy layer
        self.g_opt = optim.RMSprop(self.generator.parameters(), lr=args.lr)
        self.c_opt = optim.RMSprop(self.critic.parameters(), lr=args.lr)
        self.fixed = torch.randn(128, 8)

    def real(self, count):
        time = torch.arange(self.length) / self.length
        amplitude = 0.5 + 0.4 * torch.rand(count, 1)
        return (amplitude * torch.exp(-2 * time) * (6.2832 * (2 * time + 0.1 * torch.rand(count, 1))).sin())[:, None]

    def critic_step(self):
        self.c_opt.zero_grad()
        fake = self.generator(torch.randn(self.args.batch_size, 8)).detach()
        loss = self.critic(fake).mean() - self.critic(self.real(self.args.batch_size)).mean()
        loss.backward()
        self.c_opt.step()
        with torch.no_grad():
            for p in self.critic.parameters():
                p.clamp_(-self.args.clip, self.args.clip)
        return -loss.item()

    def generator_step(self):
        self.g_opt.zero_grad()
        loss = -self.critic(self.generator(torch.randn(self.args.batch_size, 8))).mean()
        loss.backward()
        self.g_opt.step()

    @torch.no_grad()
    def distance(self):
        self.generator.eval()
        gap = self.generator(self.fixed).mean(0) - self.real(128).mean(0)
        self.generator.train()
        return gap.abs().mean().item()

    def fit(self):
        losses = []
        for it in range(1, self.args.iters + 1):
            for _ in range(self.args.critic_steps):
                gap = self.critic_step()
            self.generator_step()
            losses.append(self.distance())
            if it % 10 == 0:
                print(f"iter {it} critic gap {gap:.4f} distance {losses[-1]:.4f}", flush=True)
        return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--critic-steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    gan = WGAN(args)
    losses = gan.fit()
    both = [*gan.generator.parameters(), *gan.critic.parameters()]
    param_sum = sum(p.detach().double().abs().sum().item() for p in both)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
