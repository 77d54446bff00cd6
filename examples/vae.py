"""Convolutional variational autoencoder on generated sprites, with KL annealing.

Adam, `zero_grad(set_to_none=False)` at the end of the iteration, transposed convolutions, the reparameterisation trick,
samples drawn from the prior after training.

Class: generative
"""
import argparse
import json

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def sprites(count, seed):
    """Binary-ish 16x16 images of one or two soft rectangles."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(16.0)
    images = torch.zeros(count, 1, 16, 16)
    for i in range(count):
        for _ in range(1 + int(torch.randint(0, 2, (), generator=g))):
            cx, cy, w, h = (torch.rand(4, generator=g) * torch.tensor([12.0, 12.0, 4.0, 4.0]) + 2).tolist()
            bx = torch.sigmoid(3 * (w / 2 - (grid - cx).abs()))
            by = torch.sigmoid(3 * (h / 2 - (grid - cy).abs()))
            images[i, 0] = torch.maximum(images[i, 0], by[:, None] * bx[None, :])
    return images


class Encoder(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, hidden, 4, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(hidden, 2 * hidden, 4, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
        )
        self.mu = nn.Linear(32 * hidden, latent)
        self.log_var = nn.Linear(32 * hidden, latent)

    def forward(self, x):
        h = self.net(x)
        return self.mu(h), self.log_var(h)


class Decoder(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.fc = nn.Linear(latent, 32 * hidden)
        self.up1 = nn.ConvTranspose2d(2 * hidden, hidden, 4, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(hidden, 1, 4, stride=2, padding=1)

    def forward(self, z):
        h = F.silu(self.fc(z)).view(len(z), -1, 4, 4)
        return self.up2(F.silu(self.up1(h)))


class VAE(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.latent = latent
        self.encoder = Encoder(hidden, latent)
        self.decoder = Decoder(hidden, latent)

    def forward(self, x):
        mu, log_var = self.encoder(x)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        return self.decoder(z), mu, log_var

    def sample(self, count):
        return torch.sigmoid(self.decoder(torch.randn(count, self.latent)))


def elbo(logits, x, mu, log_var, beta):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum() / len(x)
    return reconstruction + beta * kl, reconstruction, kl


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=12)
    parser.add_argument("--latent", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset(sprites(512, args.seed)), batch_size=args.batch_size, shuffle=True)
    vae = VAE(args.hidden, args.latent)
    opt = torch.optim.Adam(vae.parameters(), lr=args.lr)

    losses, kls = [], []
    it = 0
    vae.train()
    while it < args.iters:
        for (x,) in loader:
            beta = min(1.0, it / max(1, args.iters // 2))
            logits, mu, log_var = vae(x)
            loss, reconstruction, kl = elbo(logits, x, mu, log_var, beta)
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=False)
            losses.append(loss.item())
            kls.append(kl.item())
            it += 1
            if it % 10 == 0:
                print(f"iter {it} elbo {loss.item():.2f} rec {reconstruction.item():.2f} kl {kl.item():.2f} beta {beta:.2f}", flush=True)
            if it == args.iters:
                break

    vae.eval()
    with torch.inference_mode():
        brightness = vae.sample(64).mean().item()
    print(f"mean brightness of samples {brightness:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in vae.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "kl": kls, "brightness": brightness}), flush=True)


if __name__ == "__main__":
    main()
