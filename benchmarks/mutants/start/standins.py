"""Synthetic data under the names of the loaders that programs call, so that nothing is downloaded.

`torchvision` stands for the few names of it that the programs use: data sets of pictures, transforms, `save_image`.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

_SAMPLES = int(os.environ.get("MUTANTS_SAMPLES", "64"))


def _dataset(name, shape, classes):
    """A data set of random pictures whose labels can be learned, the same in every process."""
    import torch
    from torch.utils.data import Dataset

    class Standin(Dataset):
        def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False):
            generator = torch.Generator().manual_seed(int(train))
            self.targets = torch.randint(classes, (_SAMPLES if train else _SAMPLES // 4,), generator=generator)
            noise = torch.randint(64, (len(self.targets), *shape), generator=generator, dtype=torch.uint8)
            self.data = noise + (self.targets * (150 // classes)).to(torch.uint8).reshape(-1, *[1] * len(shape))
            self.transform, self.target_transform = transform, target_transform

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            picture, target = self.data[index], int(self.targets[index])
            if self.transform is not None:
                picture = self.transform(picture)
            return picture, target if self.target_transform is None else self.target_transform(target)

    Standin.__name__ = Standin.__qualname__ = name
    Standin.__module__ = "torchvision.datasets.mnist"
    return Standin


def _transforms():
    """The transforms that the programs compose, on tensors of bytes."""
    import torch

    def to_tensor(picture):
        if picture.dtype != torch.uint8:
            return picture
        return (picture[None] if picture.dim() == 2 else picture.movedim(-1, 0)).float() / 255

    def resize(size):
        return lambda picture: torch.nn.functional.interpolate(to_tensor(picture)[None], size=(size, size))[0]

    def normalize(mean, std):
        mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (mean, std))
        return lambda picture: (picture - mean) / std

    def compose(steps):
        def run(picture):
            for step in steps:
                picture = step(picture)
            return picture

        return run

    return {"Compose": compose, "ToTensor": lambda: to_tensor, "Resize": resize, "Normalize": normalize}


def _fill(name, module):
    if name == "torchvision":
        from importlib import import_module

        for part in ("datasets", "transforms", "utils"):
            setattr(module, part, import_module(f"torchvision.{part}"))
    elif name == "torchvision.datasets":
        module.MNIST = _dataset("MNIST", (28, 28), 10)
        module.CIFAR10 = _dataset("CIFAR10", (32, 32, 3), 10)
    elif name == "torchvision.transforms":
        vars(module).update(_transforms())
    elif name == "torchvision.utils":
        module.save_image = lambda *args, **kwargs: None


class _Maker(importlib.abc.Loader):
    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        _fill(module.__name__, module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins before what is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "torchvision" or name.count(".") > 1:
            return None
        return importlib.machinery.ModuleSpec(name, _Maker(), is_package=True)


def install():
    """Put the stand-ins in place of what is installed, if anything is."""
    sys.meta_path.insert(0, Finder())
