"""Small parallel programs that others wrote, from checkouts of their repositories; each file registers those of one kind.

Their layers, wrappers, optimizers and schedules run unchanged on the CPU. The loop around them, one step, and the network that they are put into
are ours; kernels of a GPU that a program calls are replaced by their mathematical definition. Nothing of theirs is copied here.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

Step = Callable[[], object]


class Program(msgspec.Struct, frozen=True):
    """A program: by whom, on which mesh, the step of one device and that of a rank; `rows`: ranks have rows of the batch."""

    name: str
    by: str
    mesh: str
    alone: Step
    parallel: Step


PROGRAMS: Final[dict[str, Program]] = {}
ROOT: list[Path] = []


def program(name: str, by: str, mesh: str) -> Callable[[Callable[[], tuple[Step, Step] | Step]], None]:
    """Register what a function makes: (alone, parallel), or one step for both."""

    def register(make: Callable[[], tuple[Step, Step] | Step]) -> None:
        def lazily(which: int) -> Step:
            def step() -> object:
                made = make()
                return (made[which] if isinstance(made, tuple) else made)()

            return step

        PROGRAMS[name] = Program(name, by, mesh, lazily(0), lazily(1))

    return register


def checkout(by: str, inside: str = "") -> Path:
    """Where a repository lies; it is put on the path of imports."""
    found = ROOT[0] / by.replace("/", "+") / inside
    if not found.is_dir():
        raise FileNotFoundError(f"{found}: no checkout of {by}")
    if str(found) not in sys.path:
        sys.path.insert(0, str(found))
    return found


def stub(name: str, **attributes: Any) -> None:
    """A module that is not there and that a program imports: it has what is named."""
    for k in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:k])
        if part not in sys.modules:
            made = types.ModuleType(part)
            made.__path__ = []
            made.__spec__ = importlib.machinery.ModuleSpec(part, None, is_package=True)
            sys.modules[part] = made
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)


def who() -> tuple[int, int]:
    """Rank and how many; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of one rank, for programs that cannot do without, where there is none."""
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def normal(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Give all parameters random values, so that nothing is lost where they would be 0 or 1; what they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (1.0 if parameter.ndim == 1 and "weight" in name else 0.0))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def load(model: nn.Module, values: Mapping[str, torch.Tensor], rank: int, world: int) -> None:
    """Give a rank's parameters the part of whole ones that is theirs: along the dimension that is shorter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            there = values[name]
            for dim, (n, m) in enumerate(zip(parameter.shape, there.shape)):
                if n != m:
                    there = there.narrow(dim, rank * n, n)
            parameter.copy_(there)


def tokens(rows: int, length: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    found = torch.randint(0, classes, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    return found[:, :-1], found[:, 1:]


def rows_of(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows."""
    rank, world = who()
    return [t.chunk(world)[rank] for t in batch]


def numbers(*shape: int, seed: int = 9) -> torch.Tensor:
    """Inputs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, target: torch.Tensor) -> None:
    """One step with cross-entropy."""
    logits = model(*x) if isinstance(x, tuple) else model(x)
    F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1)).backward()
    optimizer.step()


def everything() -> dict[str, Program]:
    """All of them."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    return PROGRAMS
