"""Axes that a library's own configuration objects have, so that a program needs no arguments for them: one file a library, which registers itself.

In the first run adapters only look: which objects the program made, and which changes of them must not matter. For each such change (`Axis`) the program runs again with the
environment variable `VARIABLE` set to "library:axis"; there the adapter makes it, before the library reads its configuration. The file that the user wrote stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, TypeVar

import msgspec

VARIABLE: Final = "PROCTOR_SELF_VARY"


class Axis(msgspec.Struct, frozen=True, order=True):
    """A change that must not matter.

    Attributes:
        library: whose configuration.
        name: of the axis.
        said: before and after, in words.
    """

    library: str
    name: str
    said: str


class Adapter(ABC):
    """Of one library; everything in it happens in the user's process.

    Attributes:
        library: module whose import it waits for.
    """

    library: ClassVar[str]

    @abstractmethod
    def look(self) -> None:
        """Note with `offer` what could be changed; changes nothing."""

    @abstractmethod
    def change(self, axis: str) -> None:
        """From now on, make the change wherever the program configures the library."""


_ADAPTERS: dict[str, Adapter] = {}
_offered: set[Axis] = set()
Kind = TypeVar("Kind", bound=type[Adapter])


def register(kind: Kind) -> Kind:
    """Make an adapter known."""
    _ADAPTERS[kind.library] = kind()
    return kind


def offer(library: str, name: str, said: str) -> None:
    """Note an axis of this program."""
    _offered.add(Axis(library, name, said))


def offered() -> list[Axis]:
    """What was noted in this process."""
    return sorted(_offered)


def install() -> None:
    """Wait for the libraries: to change what `VARIABLE` says, or else to look. What goes wrong in an adapter is said once and leaves the program alone."""
    import wrapt

    library, _, axis = os.environ.get(VARIABLE, "").partition(":")
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    for name, adapter in _ADAPTERS.items():
        if library in ("", name):
            wrapt.register_post_import_hook(functools.partial(_guarded, adapter, axis), name)


def _guarded(adapter: Adapter, axis: str, _: object) -> None:
    try:
        if axis:
            adapter.change(axis)
        else:
            adapter.look()
    except Exception as e:  # noqa: BLE001 - another version of the library: the program goes on
        print(f"proctor: {adapter.library}: its configuration is not varied: {type(e).__name__}: {e}", file=sys.stderr)


def divisible(loader: Any) -> bool:
    """Whether a loader of torch has batches of an even number of samples."""
    size = getattr(loader, "batch_size", None)
    return isinstance(size, int) and size > 0 and size % 2 == 0


def halved(loader: Any) -> Any:
    """The same samples in the same order, half as many at once; what cannot be halved as it is."""
    from torch.utils.data import DataLoader

    if not divisible(loader):
        return loader
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size // 2, sampler=loader.sampler, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        drop_last=loader.drop_last, worker_init_fn=loader.worker_init_fn, generator=loader.generator,
    )  # fmt: skip
