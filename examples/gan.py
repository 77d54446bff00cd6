"""Generative adversarial network on a ring of Gaussians.

Generator and discriminator with one Adam each (betas 0.5, 0.999), trained in turn; fake samples detached in the
discriminator's step; the discriminator's gradients are cleared through `model.zero_grad()`.
`losses` is the energy distance between generated and real points, taken with a fixed noise sample, once an iteration.

Class: generative
"""
import argparse
import json
import math

import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, noise, hidden):
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(
            nn.Linear(noise, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, 2),
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def real_points(count, modes=8):
    angle = torch.randint(0, modes, (count,)) * (2 * math.pi / modes)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2 + 0.1 * torch.randn(count, 2)


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.1)
        nn.init.zeros_(module.bias)


@torch.no_grad()
def energy_distance(generator, z, real):
    generator.eval()
    fake = generator(z)
    generator.train()
    return (2 * torch.cdist(fake, real).mean() - torch.cdist(fake, fake).mean() - torch.cdist(real, real).mean()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--noise", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    netG = Generator(args.noise, args.hidden).apply(weights_init)
    netD = Discriminator(args.hidden).apply(weights_init)
    optG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch_size), torch.zeros(args.batch_size)
    fixed_z, reference = torch.randn(256, args.noise), real_points(256)

    losses, loss_d, loss_g = [], [], []
    for it in range(1, args.iters + 1):
        # Discriminator: real up, fake down.
        netD.zero_grad()
        errD_real = criterion(netD(real_points(args.batch_size)), ones * 0.9)
        errD_real.backward()
        fake = netG(torch.randn(args.batch_size, args.noise))
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optD.step()

        # Generator: make the discriminator say real.
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optG.step()

        loss_d.append((errD_real + errD_fake).item())
        loss_g.append(errG.item())
        losses.append(energy_distance(netG, fixed_z, reference))
        if it % 15 == 0:
            print(f"iter {it} D {loss_d[-1]:.4f} G {loss_g[-1]:.4f} distance {losses[-1]:.4f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for net in (netG, netD) for p in net.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "loss_d": loss_d, "loss_g": loss_g}), flush=True)


if __name__ == "__main__":
    main()
