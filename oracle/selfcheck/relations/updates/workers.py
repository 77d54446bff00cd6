"""A loader with two workers gives the batches of a loader with none.

The program's own dataset, sampler and collate function, read twice from the same seeds. Catches streams that every worker reads whole, datasets that
share a position or a file between workers, and caches. What changes an item by chance is drawn by the item's number, so that it is the same in both;
where a batch is changed by chance, only streams are judged.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from proctor.oracle.selfcheck import NotApplicable, Unknown, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.items import by_number
from proctor.oracle.selfcheck.watching.step import Update, seeded, short
from proctor.oracle.selfcheck.watching.values import tensors

BATCHES: Final = 6


@register
class Workers(UpdateRelation):
    """Reads a few batches of the loader that feeds the step."""

    name, claim = "workers", "a loader with two workers gives the batches of one with none"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        loaders = [x for x in update.loaders if type(x) is DataLoader]
        if not loaders:
            raise NotApplicable("no DataLoader of torch feeds the program")
        loader = loaders[-1]
        try:
            one, same, again, other = (_read(loader, workers, seed) for workers, seed in ((0, 0), (0, 0), (0, 1), (2, 0)))
        except Exception as e:  # noqa: BLE001 - the program's own dataset
            raise Unknown(f"its batches cannot be read once more: {short(e)}") from None
        kind, stream = type(loader.dataset), isinstance(loader.dataset, IterableDataset)
        if one == same == other:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"{len(one)} batches are the same")
        twice = len(set(other)) < len(other) and len(set(one)) == len(one)
        kept = one != same and not stream
        if not twice and not kept and (one != again or one != same or _chance(loader)):
            raise Unknown("its samples are changed by chance, so that batches cannot be compared")
        lines = getattr(kind.__iter__ if stream else getattr(kind, "__getitem__", None), "__code__", None)
        at = next((i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b), 0)
        return Outcome(
            relation=self.name, verdict="different",
            reason=("read again from the same seeds, its batches are others: an item depends on what was read before, and each worker keeps its own past" if kept else f"batch {at} is another with two workers") + (": each worker gives the whole stream, so samples come twice" if stream and twice else ""),
            expected="the same batches, each sample once", seen=f"{len(set(other))} different ones of {len(other)}, against {len(set(one))} of {len(one)} without workers",
            culprit=Culprit("", kind.__name__, f"{lines.co_filename}:{lines.co_firstlineno}" if lines is not None else ""),
            advice="use torch.utils.data.get_worker_info() to give each worker its part" if stream else "a dataset must not keep a position, a file or a cache that items share",
        )  # fmt: skip


def _read(loader: DataLoader[Any], workers: int, seed: int) -> list[str]:
    """Digests of the first batches, in the order of a sampler that starts from one seed."""
    seeded(0)
    sampler: dict[str, Any] = {}
    if isinstance(loader.dataset, IterableDataset):
        sampler = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    else:
        if loader.generator is not None:
            loader.generator.manual_seed(0)
        batches = list(itertools.islice(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler), BATCHES))
        sampler = {"batch_sampler": batches} if loader.batch_sampler is not None else {"sampler": batches, "batch_size": None}
    seeded(seed)
    if workers == 0 and seed == 0:
        torch.empty((), dtype=torch.int64).random_()  # what a loader draws for the seed of its workers
    made: DataLoader[Any] = DataLoader(
        by_number(loader.dataset), num_workers=workers, collate_fn=loader.collate_fn, worker_init_fn=loader.worker_init_fn, timeout=120 if workers else 0,
        multiprocessing_context="fork" if workers else None, **sampler,
    )  # fmt: skip
    found = [_digest(batch) for batch in itertools.islice(_whole(made), BATCHES)]
    if not found:
        raise Unknown("its loader gives nothing any more")
    return found


def _whole(loader: DataLoader[Any]) -> Iterator[Any]:
    yield from loader


def _chance(loader: DataLoader[Any]) -> bool:
    """Whether reading items draws random numbers in this process."""
    from proctor.oracle.selfcheck.watching.fork import random_states

    if isinstance(loader.dataset, IterableDataset):
        return False
    before = str(random_states()[0].sum()), str(random_states()[3])
    legacy = str(random_states()[2])
    loader.dataset[0]
    return before != (str(random_states()[0].sum()), str(random_states()[3])) or legacy != str(random_states()[2])


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    count = 0
    for path, tensor in tensors(batch):
        count += 1
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{path}{tuple(plain.shape)}{plain.dtype}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() and plain.layout == torch.strided else b"")
    if not count:
        digest.update(repr(batch).encode(errors="replace")[:65536])
    return digest.hexdigest()
