import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent, width):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(latent, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 6), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, x):
        return self.model(x)


class GAN(nn.Module):
    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.generator = Generator(hparams.latent_dim, hparams.width)
        self.discriminator = Discriminator(hparams.width)
        self.noise = torch.Generator().manual_seed(hparams.seed + 2)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [opt_g, opt_d]

    def training_step(self, batch, batch_idx, optimizer_idx):
        z = torch.randn(len(batch), self.hparams.latent_dim, generator=self.noise)
        if optimizer_idx == 0:
            return F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), torch.ones(len(batch), 1))
        real = F.binary_cross_entropy_with_logits(self.discriminator(batch), torch.ones(len(batch), 1))
        fake = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z).detach()), torch.zeros(len(batch), 1))
        return (real + fake) / 2


class Trainer:
    def __init__(self, max_steps):
        self.max_steps = max_steps
        self.logged = []

    def fit(self, module, batches):
        optimizers = module.configure_optimizers()
        module.train()
        for batch_idx, batch in enumerate(batches):
            if batch_idx == self.max_steps:
                break
            for optimizer_idx, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                loss = module.training_step(batch, batch_idx, optimizer_idx)
                loss.backward()
                optimizer.step()
                self.logged.append(loss.item())


def real_batches(seed):
    generator = torch.Generator().manual_seed(seed + 1)
    mixing = torch.randn(6, 6, generator=torch.Generator().manual_seed(5)) / 3
    while True:
        yield torch.tanh(torch.randn(16, 6, generator=generator) @ mixing + 0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--latent-dim", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    hparams = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(hparams.seed)
    trainer = Trainer(hparams.steps)
    trainer.fit(GAN(hparams), real_batches(hparams.seed))
    print("RESULT " + json.dumps({"losses": trainer.logged}))
