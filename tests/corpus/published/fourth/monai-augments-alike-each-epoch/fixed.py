import argparse
import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)
        return self


class RandFlipShift(Randomizable):
    def __call__(self, image):
        if self.R.rand() < 0.5:
            image = image[..., ::-1]
        return np.roll(image, self.R.randint(-3, 4), axis=-2)


class RandGaussianNoise(Randomizable):
    def __call__(self, image):
        return image + self.R.normal(0, 0.2, image.shape)


class ScanDataset(Dataset):
    def __init__(self, count, transforms, seed):
        source = np.random.RandomState(seed)
        self.labels = source.randint(0, 2, count)
        self.images = source.normal(0, 1, (count, 1, 10, 10))
        for image, label in zip(self.images, self.labels):
            image[0, 3:6, 3:6] += 2.0 * label
        self.transforms = transforms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        for transform in self.transforms:
            image = transform(image)
        return torch.tensor(np.ascontiguousarray(image), dtype=torch.float32), int(self.labels[index])


def worker_init_fn(worker_id):
    info = get_worker_info()
    for transform in info.dataset.transforms:
        transform.set_random_state(info.seed % 2**32)


class UNetEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width), nn.PReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.InstanceNorm2d(width), nn.PReLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.down2(self.down1(x)).amax((2, 3)))


def main(args):
    transforms = [RandFlipShift().set_random_state(args.seed), RandGaussianNoise().set_random_state(args.seed + 1)]
    dataset = ScanDataset(48, transforms, args.seed + 7)
    loader = DataLoader(dataset, batch_size=8, shuffle=False, num_workers=2, worker_init_fn=worker_init_fn)
    model = UNetEncoder(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses, sums = [], []
    for _ in range(args.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            sums.append(images.sum().item())
    print("RESULT " + json.dumps({"losses": losses, "sums": sums}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
