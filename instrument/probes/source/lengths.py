"""How many things an object has, where no code of the program has to run to know it. Used by `reading.py`.

`len` of a loader asks its sampler, which asks the data set, whose `__len__` the program wrote: it may read a disk, count, draw or raise. So a `__len__` of the
program's is not called but read: one that gives `len(self.items)`, `self.count`, or a plain calculation of such is worked out here; of another one nothing is known.
What torch and other libraries wrote is called, where all that it asks is such.
"""

from __future__ import annotations

import dis
import operator
import os
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
)

from proctor.instrument.observe.plainly import held, own
from proctor.instrument.patch.usercode import library_prefixes

SIZED: Final = (list, tuple, dict, set, frozenset, range)
_DEPTH: Final = 6
_UNKNOWN: Final = object()
_BETWEEN: Final = frozenset({"RESUME", "PRECALL", "PUSH_NULL", "CACHE", "NOP", "COPY_FREE_VARS", "NOT_TAKEN", "EXTENDED_ARG"})
_ARITHMETIC: Final[dict[str, Callable[[Any, Any], Any]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
_MANY: Final = 24  # instructions of a method that is worked out


def counted(thing: Any, depth: int = _DEPTH) -> float | None:
    """`len` of a loader, a sampler, a data set or a container; `None` where nobody knows it without the program's code."""
    if depth <= 0 or (isinstance(thing, IterableDataset) and not isinstance(thing, ChainDataset)):
        return None
    method = _method(type(thing))
    if method is None:
        return None
    if not _of_a_library(method):
        found = _worked_out(method, thing, depth)
        return float(found) if type(found) is int and found >= 0 else None
    if all(_safe(part, depth - 1) for part in _asked(thing)):
        try:
            return float(len(thing))
        except Exception:  # noqa: BLE001  whatever a library says of what it holds
            return None
    return None


def _method(cls: type) -> Any:
    return next((base.__dict__["__len__"] for base in cls.__mro__ if "__len__" in base.__dict__), None)


def _asked(thing: Any) -> list[Any]:
    """What the `__len__` of a library asks in turn."""
    if isinstance(thing, DataLoader):
        return [own(thing, name) for name in ("dataset", "sampler", "batch_sampler")]
    if isinstance(thing, BatchSampler):
        return [own(thing, "sampler")]
    if isinstance(thing, Sampler | Subset | ConcatDataset):
        return [value for name, value in held(thing).items() if name in ("data_source", "dataset", "indices", "sampler")]
    return []


def _safe(part: Any, depth: int) -> bool:
    return part is None or type(part) in SIZED or type(part).__module__ in ("numpy", "builtins") or issubclass(type(part), torch.Tensor) or counted(part, depth) is not None


@lru_cache(maxsize=1024)
def _of_a_library(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    if not isinstance(code, types.CodeType):
        return True  # of C
    path = os.path.abspath(code.co_filename)
    return path.startswith(library_prefixes()) or path.startswith(os.path.dirname(os.path.abspath(str(sys.modules["torch"].__file__))))


@lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> tuple[tuple[str, Any], ...] | None:
    found = tuple((i.opname, i.argrepr if i.opname == "BINARY_OP" else i.argval) for i in dis.get_instructions(code) if i.opname not in _BETWEEN)
    return found if len(found) <= _MANY else None


def _worked_out(method: Any, thing: Any, depth: int) -> Any:
    """What a method of the program's gives: `len(self.items)`, `self.count // self.size`."""
    code = getattr(method, "__code__", None)
    steps = _instructions(code) if isinstance(code, types.CodeType) and code.co_argcount == 1 else None
    stack: list[Any] = []
    for name, value in steps or ():
        if name == "RETURN_CONST":
            return value
        if name == "RETURN_VALUE":
            return stack[-1]
        if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            stack.append(value)
        elif name in ("LOAD_FAST", "LOAD_FAST_BORROW"):
            stack.append(thing)
        elif name == "LOAD_GLOBAL" and value == "len" and "len" not in method.__globals__:
            stack.append(len)
        elif name in ("LOAD_ATTR", "LOAD_INSTANCE_VALUE") and stack:
            stack.append(_attribute(stack.pop(), value))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and value == "[]"):
            key, holder = stack.pop(), stack.pop()
            plain = (type(holder) in (tuple, list, torch.Size) and type(key) is int and -len(holder) <= key < len(holder)) or (type(holder) is dict and type(key) in (str, int) and key in holder)
            stack.append(holder[key] if plain else _UNKNOWN)
        elif name == "BINARY_OP" and len(stack) > 1 and value in _ARITHMETIC and all(type(one) is int for one in stack[-2:]):
            right, left = stack.pop(), stack.pop()
            if right == 0 and value in ("//", "%"):
                return _UNKNOWN
            stack.append(_ARITHMETIC[value](left, right))
        elif name == "CALL" and value == 1 and len(stack) > 1 and stack[-2] is len:
            given = stack.pop()
            stack[-1] = length(given, depth - 1)
        else:
            return _UNKNOWN
        if stack[-1] is _UNKNOWN or stack[-1] is None:
            return _UNKNOWN
    return _UNKNOWN


def _attribute(thing: Any, name: str) -> Any:
    if name == "shape" and issubclass(type(thing), torch.Tensor):
        with torch._C.DisableTorchFunction():
            return tuple(torch.Tensor.shape.__get__(thing))
    if name == "shape" and type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
        return thing.shape
    return own(thing, name, _UNKNOWN)


def length(thing: Any, depth: int = _DEPTH) -> int | None:
    """`len` of what a method of the program's counts."""
    if type(thing) in SIZED or type(thing) in (str, bytes):
        return len(thing)
    if issubclass(type(thing), torch.Tensor):
        with torch._C.DisableTorchFunction():
            return int(torch.Tensor.shape.__get__(thing)[0]) if torch.Tensor.dim(thing) else None
    found = counted(thing, depth) if isinstance(thing, Dataset | Sampler | DataLoader) or type(thing).__module__.partition(".")[0] in _TABLES else None
    return None if found is None else int(found)


_TABLES: Final = frozenset({"numpy", "collections", "pandas", "polars", "pyarrow", "datasets", "h5py", "array"})
