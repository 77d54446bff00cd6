"""What an object of the program is and holds, asked for so that no code of the program runs.

Probes look at objects while the program stands still, on its own thread. `getattr`, `hasattr`, `isinstance`, `len` and `or` may run what the
program wrote (properties, `__getattr__`, `__class__`, `__len__`, `__bool__`): that could draw random numbers, take long, or raise. Modules, parameters and buffers below a
module come as `torch.nn.Module` gives them, in its order, but from what modules hold: a model may override `parameters` or `named_modules`, with fewer arguments than torch's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

_Above = tuple[int, "_Above"] | None  # modules that hold one: the nearest, and those above it


def is_tensor(value: Any) -> bool:
    """Whether an object is a tensor, by its class alone."""
    import torch

    return issubclass(type(value), torch.Tensor)


def lazy(tensor: Any) -> bool:
    """Whether this is a parameter or a buffer of a lazy module before its first forward, which has no shape."""
    import torch

    return issubclass(type(tensor), torch.nn.parameter.UninitializedTensorMixin)


def is_scalar(tensor: Any) -> bool:
    """Whether a tensor has no dimension."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return bool(tensor.dim() == 0)
    with torch._C.DisableTorchFunction():
        return bool(tensor.dim() == 0)


def trained(tensor: Any) -> bool:
    """Whether a parameter asks for a gradient."""
    import torch

    with torch._C.DisableTorchFunction():
        return bool(tensor.requires_grad)


def placed(tensor: Any) -> bool:
    """Whether a parameter or a buffer lies in memory as one block, which sparse and nested ones and lazy ones do not."""
    import torch

    if lazy(tensor):
        return False
    with torch._C.DisableTorchFunction():
        return tensor.layout is torch.strided and not tensor.is_nested


def placed_of(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Those that lie in memory so, with their names."""
    return (pair for pair in named if placed(pair[1]))


def held(thing: Any) -> dict[str, Any]:
    """The attributes that an object holds itself; of a module without its parameters, buffers and modules."""
    try:
        found: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found


def own(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute that is data: in the object's dictionary, or a plain value of its class. What is computed when it is asked for is not."""
    mine = held(thing)
    if name in mine:
        return mine[name]
    for base in type(thing).__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            return default if hasattr(type(found), "__get__") else found
    return default


def inside(value: Any) -> list[Any] | None:
    """What a list, a tuple or a dict holds, also where the program's class of it gives something else; `None` of what is none of these."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, list):
        return list.copy(value)
    return [*tuple.__iter__(value)] if issubclass(kind, tuple) else None


def transforming() -> bool:
    """Whether a transform of `torch.func` runs: parameters may then be stood in for by what has no memory."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


def named_modules(root: Any, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """A module and all below it, by path: each before what it holds. One that is held twice comes once, unless all its paths are asked for."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any, _Above]] = [("", root, None)]
    while waiting:
        path, module, above = waiting.pop()
        if (remove_duplicate and id(module) in seen) or _within(module, above):
            continue
        seen.add(id(module))
        yield path, module
        below = [(f"{path}.{name}" if path else name, child, (id(module), above)) for name, child in _held(module, "_modules") if child is not None]
        waiting += reversed(below)


def modules(root: Any) -> Iterator[Any]:
    """A module and all below it."""
    return (module for _, module in named_modules(root))


def named_parameters(root: Any, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """All parameters below a module, by path."""
    return _tensors(root, "_parameters", remove_duplicate=remove_duplicate)


def parameters(root: Any) -> Iterator[Any]:
    """All parameters below a module."""
    return (parameter for _, parameter in named_parameters(root))


def named_buffers(root: Any, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """All buffers below a module, by path."""
    return _tensors(root, "_buffers", remove_duplicate=remove_duplicate)


def _within(module: Any, above: _Above) -> bool:
    """Whether a module is held by itself."""
    while above is not None:
        nearest, above = above
        if nearest == id(module):
            return True
    return False


def _tensors(root: Any, kind: str, *, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in named_modules(root, remove_duplicate=remove_duplicate):
        for name, tensor in _held(module, kind):
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield (f"{path}.{name}" if path else name), tensor


def _held(module: Any, kind: str) -> list[tuple[str, Any]]:
    """The entries of a dictionary of a module; a scripted module has its own kind of dictionary, and an engine may have one that gathers what is asked for by name."""
    entries: Any = held(module).get(kind)
    if issubclass(type(entries), OrderedDict):
        return list(OrderedDict.items(entries))
    if issubclass(type(entries), dict):
        return list(dict.items(entries))
    return [] if entries is None else list(entries.items())
