import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


def squash(s, dim=-1):
    norm2 = s.pow(2).sum(dim, keepdim=True)
    return norm2 / (1 + norm2) * s / (norm2 + 1e-8).sqrt()


class PrimaryCaps(nn.Module):
    def __init__(self, channels, capsules, size):
        super().__init__()
        self.size = size
        self.conv = nn.Conv2d(channels, capsules * size, 3, stride=2)

    def forward(self, x):
        u = self.conv(x)
        u = u.view(len(x), -1, self.size, u.shape[2] * u.shape[3]).transpose(2, 3)
        return squash(u.reshape(len(x), -1, self.size))


class DigitCaps(nn.Module):
    def __init__(self, inputs, input_size, outputs, output_size, iterations=3):
        super().__init__()
        self.iterations = iterations
        self.W = nn.Parameter(torch.randn(inputs, outputs, output_size, input_size) * 0.2)

    def forward(self, u):
        u_hat = torch.einsum("iodk,bik->biod", self.W, u)
        frozen = u_hat.detach()
        b_ij = torch.zeros(u.shape[0], self.W.shape[0], self.W.shape[1])
        for iteration in range(self.iterations):
            c_ij = F.softmax(b_ij, dim=1)
            last = iteration == self.iterations - 1
            v = squash((c_ij.unsqueeze(-1) * (u_hat if last else frozen)).sum(1))
            if not last:
                b_ij = b_ij + (frozen * v.unsqueeze(1)).sum(-1)
        return v


class CapsNet(nn.Module):
    def __init__(self, width, classes=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU())
        self.primary = PrimaryCaps(width, 2, 4)
        self.digits = DigitCaps(2 * 9, 4, classes, 6)
        self.decoder = nn.Sequential(nn.Linear(classes * 6, 4 * width), nn.ReLU(), nn.Linear(4 * width, 81), nn.Sigmoid())

    def forward(self, images, onehot):
        v = self.digits(self.primary(self.conv(images)))
        return v, self.decoder((v * onehot.unsqueeze(-1)).flatten(1))


def margin_loss(v, onehot):
    length = v.norm(dim=-1)
    present = F.relu(0.9 - length).pow(2)
    absent = F.relu(length - 0.1).pow(2)
    return (onehot * present + 0.5 * (1 - onehot) * absent).sum(1).mean()


def digits(count, generator):
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.rand(count, 1, 9, 9, generator=generator) * 0.3
    for image, label in zip(images, labels.tolist()):
        row, column = divmod(label, 2)
        image[0, 5 * row : 5 * row + 4, 5 * column : 5 * column + 4] += 0.6
    return images, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = CapsNet(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        images, labels = digits(16, generator)
        onehot = F.one_hot(labels, 4).float()
        optimizer.zero_grad()
        v, reconstruction = model(images, onehot)
        loss = margin_loss(v, onehot) + 0.0005 * (reconstruction - images.flatten(1)).pow(2).sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
