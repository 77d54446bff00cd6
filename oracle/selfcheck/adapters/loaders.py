"""torch's loaders: which samples each rank reads, noted in one run and read again, by one rank all of them, in another (`program/ranks.py`).

Nothing is offered here: what is done is said by `VARIABLE`, "torch.utils.data:WHAT FOLDER". WHAT is `note` (write down what this rank's loaders read and its learning rates), `apart` (read
the same again), `union` (one rank reads what all did, batch by batch, in the order of the ranks), `own` (its own), `first` (what the first rank did), or `twice` (that, each batch twice). Turns of loaders are known by the
order in which they begin, since libraries make new loaders out of those of the program. Where both are recorded, generators are seeded: a program that seeds itself overrides that. What changes an item by chance (augmentation) is drawn by the item's number. Where a loader gives its own samples no numbers (`IterableDataset`), only their count is kept.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from proctor.oracle.selfcheck.adapters import Adapter, register

LIBRARY: Final = "torch.utils.data"
WAYS: Final = ("note", "apart", "union", "own", "first", "twice")
MAX_BATCHES: Final = 512  # of a rank, that are written down
MAX_LINE_BYTES: Final = 1 << 22


@register
class LoadersAdapter(Adapter):
    """Works on the numbers of samples that a loader takes, whatever sampler they come from."""

    library = LIBRARY

    def look(self) -> None:
        """As `Adapter.look`: nothing is to be seen."""

    def change(self, axis: str) -> None:
        """As `Adapter.change`."""
        way, _, folder = axis.partition(" ")
        if way not in WAYS:
            raise ValueError(f"{way[:40]} is no way to read")
        from torch.utils.data import DataLoader

        told = Noted(Path(folder)) if way == "note" else Read(Path(folder), way)
        _rates(told)
        from proctor.oracle.selfcheck.watching.items import read_by_number

        read_by_number()
        if way in ("apart", "union", "own"):
            from proctor.oracle.selfcheck.watching.step import seeded

            seeded(0)
            _by_sample()
        if way == "own":
            return
        wrappers: WeakKeyDictionary[Any, Numbers] = WeakKeyDictionary()
        original = DataLoader._index_sampler.fget  # what loader and workers read alike, and `len` counts; torch has no public name for it

        def index_sampler(loader: Any) -> Any:
            sampler = original(loader)
            if loader not in wrappers:
                wrappers[loader] = Numbers(sampler, told, alone=loader.batch_size is None and loader.batch_sampler is None)
            return wrappers[loader]

        DataLoader._index_sampler = property(index_sampler)


class Numbers:
    """In the place of a loader's sampler of batches.

    Args:
        sampler: the loader's.
        told: of the process.
        alone: it gives samples, no batches.
    """

    def __init__(self, sampler: Any, told: Noted | Read, *, alone: bool) -> None:
        self._sampler, self._told, self._alone = sampler, told, alone

    def __iter__(self) -> Iterator[Any]:
        turn = self._told.begin()
        return self._sampler.__iter__() if self._alone else self._told.batches(turn, iter(self._sampler))

    def __len__(self) -> int:
        own = len(self._sampler)
        return own if self._alone else self._told.length(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class Noted:
    """Writes what this rank reads.

    Args:
        folder: `rankN.jsonl` in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._loaders, self._count = folder, 0, 0

    def begin(self) -> int:
        """A loader is read from its beginning, once more or for the first time: the number of that turn."""
        self._loaders += 1
        return self._loaders - 1

    def batches(self, loader: int, own: Iterator[Any]) -> Iterator[Any]:
        """The loader's own, written down."""
        for batch in own:
            numbers = _numbers(batch)
            self.write({"loader": loader, "batch": numbers if numbers is not None else len(batch), "numbered": numbers is not None})
            yield batch

    def length(self, own: int) -> int:
        """How many batches the loader says it has."""
        return own

    def rates(self, optimizer: int, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """The learning rates of an update, and of how many ranks its process group is."""
        import torch.distributed as dist

        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.write({"optimizer": optimizer, "step": step, "world": world, "rates": [float(g["lr"]) for g in groups if "lr" in g]})

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, while there are few."""
        from proctor.instrument.observe.mesh import position

        self._count += 1
        text = json.dumps(line)
        if self._count <= MAX_BATCHES and len(text) < MAX_LINE_BYTES:
            with open(self._folder / f"rank{position()['rank']}.jsonl", "a", encoding="utf-8") as file:
                file.write(text + "\n")


class Read:
    """Gives what was written down.

    Args:
        folder: of `Noted`.
        way: of `WAYS`.
    """

    def __init__(self, folder: Path, way: str) -> None:
        self._way, self._loaders = way, 0
        self._ranks = notes(folder)

    def begin(self) -> int:
        """As of `Noted`."""
        self._loaders += 1
        return self._loaders - 1

    def batches(self, loader: int, own: Iterator[Any]) -> Iterator[Any]:
        """What was noted for the loader; after that its own."""
        from proctor.instrument.observe.mesh import position

        rank = position()["rank"] if self._way == "apart" else 0
        ranks = sorted(self._ranks) if self._way == "union" else [rank] * (2 if self._way == "twice" else 1)
        noted = [_of_loader(self._ranks.get(r, []), loader) for r in ranks]
        for parts in zip(*noted, strict=False):
            mine = next(own, None)
            if all(isinstance(p, list) for p in parts):
                yield [number for part in parts for number in part]
            elif mine is not None:  # a stream of samples: as many of them
                yield mine[:1] * sum(len(p) if isinstance(p, list) else p for p in parts)
        yield from own

    def length(self, own: int) -> int:
        """As many as each rank had."""
        return max(1, -(-own // len(self._ranks))) if self._way != "apart" and self._ranks else own

    def rates(self, optimizer: int, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Give the groups the rates that were noted: that they follow the number of ranks is by design."""
        for line in self._ranks.get(0, []):
            if line.get("optimizer") == optimizer and line.get("step") == step:
                for group, rate in zip((g for g in groups if "lr" in g), line["rates"], strict=False):
                    if isinstance(group["lr"], float | int):
                        group["lr"] = rate


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank noted, without lines that are damaged."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        lines = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    lines.append(line)
        if path.stem[4:].isdecimal():
            found[int(path.stem[4:])] = lines
    return found


def _of_loader(lines: Sequence[dict[str, Any]], loader: int) -> list[Any]:
    return [line["batch"] for line in lines if line.get("loader") == loader and isinstance(line.get("batch"), list | int)]


def _numbers(batch: Any) -> list[int] | None:
    """The numbers of a batch's samples; `None` where samples have none."""
    try:
        numbers = [int(i) for i in batch if not isinstance(i, tuple | list | str)]
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == len(batch) else None


def _rates(told: Noted | Read) -> None:
    """Look at, or set, the learning rates before each update."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    order: dict[int, int] = {}
    steps: dict[int, int] = defaultdict(int)

    def before(optimizer: Any, _: Any, __: Any) -> None:
        number = order.setdefault(id(optimizer), len(order))
        with contextlib.suppress(Exception):  # the program goes on
            told.rates(number, steps[number], optimizer.param_groups)
        steps[number] += 1

    register_optimizer_step_pre_hook(before)


def _by_sample() -> None:
    """Batch norms take the statistics of each sample by itself: those of a batch are, by design, a rank's own."""
    import torch
    import wrapt

    def forward(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not instance.training or not args or isinstance(instance, torch.nn.SyncBatchNorm) or args[0].ndim < 2:
            return original(*args, **kwargs)
        return torch.nn.functional.group_norm(args[0], 1, instance.weight, instance.bias, instance.eps)

    wrapt.wrap_function_wrapper("torch.nn.modules.batchnorm", "_BatchNorm.forward", forward)
