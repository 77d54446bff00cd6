"""What an object of the program is and holds, asked for so that no code of the program runs.

Probes look at objects while the program stands still, on its own thread. `getattr`, `hasattr`, `isinstance`, `len` and `or` may run what the
program wrote (properties, `__getattr__`, `__class__`, `__len__`, `__bool__`): that could draw random numbers, take long, or raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


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
