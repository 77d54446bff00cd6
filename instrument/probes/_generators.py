"""Random generators of a process: torch's, numpy's, Python's, and those held by datasets and their transforms.

A state is read, never drawn from, and becomes a 64-bit digest that is the same in every process.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any, Final

from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.instrument.observe.plainly import transforming

DEFAULT: Final = "torch"  # the generator that dropout, `torch.rand` and shuffling draw from
_DEPTH: Final = 3  # dataset → transform → list of transforms → transform
_ENTRIES: Final = 64  # of one container
_OBJECTS: Final = 512
_HELD: Final = 16  # generators found in one place
_MASK: Final = (1 << 64) - 1
_MT19937_BYTES: Final = 4 * 624 + 4  # key and position, numpy/random/src/mt19937/mt19937.h


def dropouts() -> Iterator[tuple[str, Any]]:
    """Generators that dropout draws from: name and object."""
    import torch

    yield DEFAULT, torch.default_generator
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        yield "cuda", torch.cuda.default_generators[torch.cuda.current_device()]


def shared() -> Iterator[tuple[str, Any]]:
    """Generators that every function of the process draws from: name and object."""
    yield from dropouts()
    numpy = sys.modules.get("numpy.random")
    state = getattr(getattr(numpy, "mtrand", None), "_rand", None)
    if state is not None:
        yield "numpy", state
    yield "python", random


def held(name: str, root: Any) -> list[tuple[str, Any]]:
    """Generators among the attributes of an object, and among the globals of the module that defines its class.

    Args:
        name: what the paths begin with: `dataset` gives `dataset.transform.rng`.
        root: a dataset, sampler or collate function; a function stands for its globals alone.
    """
    found: dict[int, tuple[str, Any]] = {}
    seen: set[int] = set()
    _walk(name, root, _DEPTH, found, seen)
    module = sys.modules.get(
        getattr(root if callable(root) and not _is_instance(root) else type(root), "__module__", "")
    )
    if module is not None and not (module.__name__ or "").startswith(("torch.", "builtins")):
        for key, value in list(vars(module).items())[: 4 * _OBJECTS]:
            if is_generator(value):
                found.setdefault(id(value), (key, value))
    return list(found.values())[:_HELD]


def digest(generator: Any) -> int | None:
    """The state of a generator; `None` where it cannot be read without a side effect."""
    if generator is random or isinstance(generator, random.Random):
        return hash(generator.getstate()) & _MASK  # a hash of integers does not depend on PYTHONHASHSEED
    kind = type(generator).__name__
    if kind == "Generator" and type(generator).__module__ == "torch._C":
        if generator.device.type not in (
            "cpu",
            "cuda",
        ):  # of these the state is read without waiting for a device
            return None
        return None if transforming() else fingerprint_all([generator.get_state()])[0].fp
    if not is_generator(generator):
        return None
    bits: Any = getattr(generator, "_bit_generator", None) or getattr(generator, "bit_generator", None)
    if bits is not None and type(bits).__name__ == "MT19937":  # its state as a dict takes 35 µs
        return _hash(ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES))
    return None if bits is None else _hash(_flat(bits.state).encode("latin-1"))


def digest_text(text: str) -> int:
    return _hash(text.encode())


def _hash(blob: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(blob, digest_size=8).digest(), "little")


def _flat(state: Any) -> str:
    """A numpy state, which is a dict of integers, arrays and further dicts, as text of bytes."""
    if isinstance(state, dict):
        return "|".join(f"{key}:{_flat(state[key])}" for key in sorted(state))
    content = getattr(state, "tobytes", None)
    return str(state) if content is None else content().decode("latin-1")


def is_generator(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ == "torch._C" and kind.__name__ == "Generator":
        return True
    if kind.__name__ in ("Generator", "RandomState") and kind.__module__.startswith("numpy.random"):
        return True
    return isinstance(value, random.Random)


def _is_instance(value: Any) -> bool:
    return not isinstance(value, type) and not hasattr(value, "__code__")


def _walk(path: str, value: Any, depth: int, found: dict[int, tuple[str, Any]], seen: set[int]) -> None:
    if is_generator(value):
        found.setdefault(id(value), (path, value))
        return
    if depth < 0 or id(value) in seen or len(seen) >= _OBJECTS:
        return
    seen.add(id(value))
    kind = type(value)
    children: list[tuple[str, Any]]
    if kind in (list, tuple):
        children = [(f"{path}[{i}]", item) for i, item in enumerate(value[:_ENTRIES])]
    elif kind is dict:
        children = [(f"{path}[{key!r}]"[:80], item) for key, item in list(value.items())[:_ENTRIES]]
    else:
        try:
            attributes = vars(value)
        except TypeError:
            return
        if isinstance(value, type) or kind.__name__ == "module":
            return
        children = [(f"{path}.{key}", item) for key, item in list(attributes.items())[:_ENTRIES]]
    for name, item in children:
        if type(item) not in (int, float, str, bytes, bool, type(None)):
            _walk(name, item, depth - 1, found, seen)
