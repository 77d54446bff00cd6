"""Numbers that a running function can see: its variables, attributes of its objects, lengths. Nothing of the user's is run.

Names are those of the source: `total`, `args.epochs`, `len(loader)`, `sizes['train']`, `x.shape[1]`. Attributes come
from instance dictionaries, so no property runs; tensors give a number only where they are one element on the CPU.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import types
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from proctor.instrument.observe.content import reader
from proctor.instrument.observe.plainly import own
from proctor.instrument.probes.source.lengths import SIZED
from proctor.instrument.probes.source.lengths import counted as counted_in

MAX_NUMBERS = 128  # of one frame
MAX_OF_OBJECT = 24
_MAX_GROUPS = 2
_GROUP = frozenset({"lr", "weight_decay", "momentum", "eps", "alpha", "max_lr", "initial_lr"})  # of an optimizer's groups
MAX_DEPTH = 2  # attributes of attributes: `self.args.epochs`

_STEP = re.compile(r"\.[A-Za-z_]\w*|\['[^'\\]*'\]")
# Objects of these have nothing to count, or too much.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, str, bytes)
_ASKS = frozenset({"locals", "vars", "eval", "exec", "f_locals"})


def number(value: Any) -> float | None:
    """A plain number, or that of a CPU tensor of one element."""
    if type(value) is torch.Tensor and not torch._C._len_torch_function_stack():  # the common case, at a third of the time
        read: float | None = reader().number(value)
        if read is not NotImplemented:
            return read
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, torch.Tensor):
        return _tensor_number(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        found = value.item()
        return float(found) if isinstance(found, bool | int | float) else None
    return None


def _tensor_number(tensor: Any) -> float | None:
    with torch._C.DisableTorchFunction():
        read: float | None = reader().number(tensor)
        if read is not NotImplemented:
            return read
        # Of a class of the program's, too, whose own methods do not run then; not of one that runs at each operation.
        plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        if not plain or torch.Tensor.dim(tensor) != 0 or torch.Tensor.device.__get__(tensor).type != "cpu" or torch.Tensor.is_complex(tensor):
            return None
        # Reading one would run the user's dispatch mode; inside `vmap` and `grad` there is no value to read.
        if torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return float(torch.Tensor.detach(tensor).as_subclass(torch.Tensor))


def length(thing: Any) -> float | None:
    """`len` of what can be counted without running the user's code."""
    if isinstance(thing, torch.Tensor):
        with torch._C.DisableTorchFunction():
            return float(torch.Tensor.shape.__get__(thing)[0]) if torch.Tensor.dim(thing) else None
    if isinstance(thing, _OPAQUE):
        return None
    if type(thing) in SIZED or (type(thing).__module__ in ("numpy", "collections", "builtins") and hasattr(thing, "__len__")):
        shape = getattr(thing, "shape", None)
        return None if shape == () or isinstance(thing, str | bytes) else float(len(thing))
    if isinstance(thing, DataLoader):
        # The length of a loader over a stream is a guess, and asking for it arms a warning.
        return None if isinstance(own(thing, "dataset"), IterableDataset) else counted_in(thing)
    if isinstance(thing, torch.utils.data.Dataset | torch.utils.data.Sampler):
        return counted_in(thing)
    return None


def fields(thing: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object that are data of its own, as paths from it."""
    if isinstance(thing, torch.optim.Optimizer):
        yield from ((f".{k}", v) for k, v in thing.defaults.items() if k in _GROUP)
        groups = list(enumerate(thing.param_groups[:_MAX_GROUPS]))
        yield from ((f".param_groups[{i}]['{k}']", v) for i, g in groups for k, v in g.items() if k in _GROUP)
    elif isinstance(thing, DataLoader):
        yield from ((f".{k}", vars(thing)[k]) for k in ("batch_size", "drop_last", "dataset", "sampler") if k in vars(thing))
    elif isinstance(thing, dict):
        yield from ((f"[{k!r}]", v) for k, v in list(dict.items(thing))[:MAX_OF_OBJECT] if type(k) is str and "'" not in k)
    elif not isinstance(thing, (torch.nn.Module, torch.Tensor, ArgumentParser, *_OPAQUE)):
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f".{k}", v) for k, v in list(own.items())[: 4 * MAX_OF_OBJECT] if not k.startswith("_"))


def numbers(scope: Mapping[str, Any], depth: int = MAX_DEPTH) -> dict[str, float]:
    """Numbers of a frame's variables and of what they hold, the nearest first; at most `MAX_NUMBERS`.

    Args:
        depth: how many attributes deep.
    """
    found: dict[str, float] = {}
    level = [(name, value, f"len({name})") for name, value in scope.items() if not name.startswith("__")]
    for level_depth in range(depth + 1):
        inner = []
        for path, value, counted in level:
            if len(found) >= MAX_NUMBERS:
                return found
            plain = number(value)
            if plain is not None:
                found[path] = plain
                continue
            count = length(value)
            if count is not None:
                found[counted] = count
            if level_depth < depth:
                inner += [(path + at, v, f"len({path}{at})") for at, v in fields(value)]
        level = inner
    return found


Get = Callable[[str], Any]


@lru_cache(maxsize=4096)
def _path(name: str) -> tuple[bool, str, tuple[str, ...], int] | None:
    """(is a length, first name, steps, axis or -1) of a name; `None` for one that is not of this form."""
    counted = name.startswith("len(") and name.endswith(")")
    rest = name[4:-1] if counted else name
    axis = re.search(r"\.shape\[(\d+)\]$", rest)
    rest = rest[: axis.start()] if axis else rest
    head = re.match(r"[A-Za-z_]\w*", rest)
    if head is None:
        return None
    steps, at = [], head.end()
    while at < len(rest):
        step = _STEP.match(rest, at)
        if step is None:
            return None
        steps.append(step[0])
        at = step.end()
    return counted, head[0], tuple(steps), int(axis[1]) if axis else -1


def read(name: str, get: Get) -> float | None:
    """The number of this name; `None` where there is none.

    Args:
        get: the object of a variable.
    """
    path = _path(name)
    if path is None:
        return None
    counted, head, steps, axis = path
    thing = get(head)
    for step in steps:
        if isinstance(thing, torch.optim.Optimizer):
            thing = thing.defaults.get(step[1:])
        elif step.startswith("["):
            thing = thing.get(step[2:-2]) if type(thing) is dict else None
        else:
            own = getattr(thing, "__dict__", None)
            thing = own.get(step[1:]) if isinstance(own, dict) else None
        if thing is None:
            return None
    if axis >= 0:
        shape = getattr(thing, "shape", ()) if isinstance(thing, torch.Tensor) else ()
        return float(shape[axis]) if axis < len(shape) else None
    return length(thing) if counted else number(thing)


def scope_of(frame: types.FrameType) -> dict[str, Any]:
    """Variables of a frame, to be given to `release` behind; none of a function that asks for its own variables (`asks`)."""
    return {} if asks(frame.f_code) else dict(frame.f_locals)


def asks(code: types.CodeType) -> bool:
    """Whether a function may ask for its own variables, by name or by its frame; `model.eval()` does not.

    Before Python 3.13 it would hold the one table that a look fills anew and `release` clears (PEP 667).
    """
    if _ASKS.isdisjoint(code.co_names) or not code.co_flags & inspect.CO_OPTIMIZED:  # a module's table is the module's own
        return False
    return "f_locals" in code.co_names or _names_it(code)


@lru_cache(maxsize=256)
def _names_it(code: types.CodeType) -> bool:
    """Whether one of `_ASKS` is read as a name, and not as an attribute; read once, since each look asks."""
    return any(i.argval in _ASKS and i.opname == "LOAD_GLOBAL" for i in dis.get_instructions(code))


def release(frame: types.FrameType, scope: dict[str, Any]) -> None:
    """Keep nothing of the user's alive: before Python 3.13 a frame keeps the table that it made for us."""
    scope.clear()
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and not asks(frame.f_code):
        frame.f_locals.clear()
