"""Conditional GAN with hinge loss whose discriminator is frozen while the generator learns.

Tricky: `requires_grad_` of the discriminator is switched off and on in every iteration, so gradients flow through
it but not into it; spectral normalisation keeps a vector of its own in buffers. `losses` is the distance of the
class means of generated icons to the real ones.

Class: generative
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm


class IconGenerator(nn.Module):
    def __init__(self, hidden, noise=6, classes=3):
        super().__init__()
        self.label = nn.Embedding(classes, noise)
        self.net = nn.Sequential(
            nn.Linear(2 * noise, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid()
        )

    def forward(self, z, label):
        return self.net(torch.cat([z, self.label(label)], 1)).view(-1, 1, 8, 8)


class ProjectionDiscriminator(nn.Module):
    def __init__(self, hidden, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            spectral_norm(nn.Conv2d(1, hidden // 4, 3, stride=2, padding=1)), nn.LeakyReLU(0.2), nn.Flatten(),
            spectral_norm(nn.Linear(16 * (hidden // 4), hidden)), nn.LeakyReLU(0.2),
        )
        self.score = spectral_norm(nn.Linear(hidden, 1))
        self.label = nn.Embedding(classes, hidden)

    def forward(self, image, label):
        h = self.features(image)
        return self.score(h).squeeze(1) + (h * self.label(label)).sum(1) / h.shape[1] ** 0.5


TEMPLATES = torch.zeros(3, 8, 8)
TEMPLATES[0, 2:6, 2:6] = 1
TEMPLATES[1, 3:5] = 1
TEMPLATES[2] = torch.eye(8)


def icons(count):
    label = torch.randint(0, 3, (count,))
    light = 0.7 + 0.3 * torch.rand(count, 1, 1, 1)
    return (TEMPLATES[label][:, None] * light + 0.05 * torch.rand(count, 1, 8, 8)).clamp(0, 1), label


@torch.no_grad()
def class_distance(generator):
    label = torch.arange(3).repeat_interleave(32)
    means = generator(torch.randn(96, 6), label).view(3, 32, 8, 8).mean(1)
    return (means - 0.85 * TEMPLATES - 0.025).abs().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48, help="a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator, discriminator = IconGenerator(args.hidden), ProjectionDiscriminator(args.hidden)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.99))

    losses = []
    for it in range(1, args.iters + 1):
        discriminator.requires_grad_(True)
        real, label = icons(args.batch_size)
        with torch.no_grad():
            fake = generator(torch.randn(args.batch_size, 6), label)
        d_optimizer.zero_grad()
        d_loss = F.relu(1 - discriminator(real, label)).mean() + F.relu(1 + discriminator(fake, label)).mean()
        d_loss.backward()
        d_optimizer.step()

        discriminator.requires_grad_(False)
        label = torch.randint(0, 3, (args.batch_size,))
        g_optimizer.zero_grad()
        g_loss = -discriminator(generator(torch.randn(args.batch_size, 6), label), label).mean()
        g_loss.backward()
        g_optimizer.step()

        losses.append(class_distance(generator))
        if it % 10 == 0:
            print(f"iter {it} D {d_loss.item():.4f} G {g_loss.item():.4f} distance {losses[-1]:.4f}", flush=True)

    everything = [*generator.parameters(), *discriminator.parameters()]
    param_sum = sum(p.detach().double().abs().sum().item() for p in everything)
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
