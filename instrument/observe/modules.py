"""Module trees: what their modules and tensors are called, and which trees own some parameters.

Called by the state tracker. A *wrapper* is a module that holds one other module and no tensor of its own: what `torch.compile`, DDP,
FSDP, checkpointing and the engines of libraries put around a model or a part of it. It contributes no name: the parameters of
`torch.compile(DDP(Net()))` are `Net`'s. No class is known by name here, but for what kind of parallelism a wrapper brings.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from proctor.instrument.observe import plainly
from proctor.invariants.codec.variable import is_wrapper_slot
from proctor.native import living as _living

_DEPTH = 16  # wrappers around wrappers


def joined(path: str, name: str) -> str:
    """A name below a path."""
    return f"{path}.{name}" if path and name else path or name


def unwrap(root: Any) -> tuple[Any, str]:
    """The user's own module inside of wrappers, and what kind of parallelism they bring."""
    kind = ""
    for _ in range(_DEPTH):
        kind = _parallel(type(root)) or kind
        inner = _wrapped(root)
        if inner is None:
            break
        root = inner
    return root, kind


def clean_names(modules: Mapping[str, Any]) -> dict[str, str]:
    """What each module of a tree is called without its wrappers.

    Args:
        modules: by path, `dict(root.named_modules(remove_duplicate=False))`.

    Returns:
        names by path, in the same order.
    """
    names: dict[str, str] = {}
    wrapped = {path for path, module in modules.items() if _wrapped(module) is not None}
    for path in modules:
        above, _, last = path.rpartition(".")
        outer = names.get(above, "")
        names[path] = outer if not path or above in wrapped else joined(outer, last)
    # A copy such as `AveragedModel` holds the model under `module`, too, beside tensors of its own.
    return {path: "" if name == "module" else name.removeprefix("module.") for path, name in names.items()}


def class_name(module: Any) -> str:
    """module.qualname of a module's class; torch's layers without where they are defined."""
    cls = type(module)
    name, place = cls.__qualname__, cls.__module__ or ""
    if name.startswith("FSDP") and len(cls.__mro__) > 2:  # fully_shard makes a subclass of the user's class
        cls = cls.__mro__[2] if cls.__mro__[1].__name__ == "FSDPModule" else cls.__mro__[1]
        name, place = cls.__qualname__, cls.__module__ or ""
    if place.startswith("torch.nn.modules."):
        return f"torch.nn.{name}"
    return f"{'__main__' if place == '__mp_main__' else place}.{name}"


def buffer_of(module: Any, name: str) -> Any:
    """What a module holds under the name of a buffer now; None if there is none. A scripted module's buffers are no dictionary."""
    try:
        return module._buffers[name]
    except KeyError:
        return None


def roots_among(modules: Iterable[Any]) -> list[Any]:
    """Those of some modules, the whole program's, that none of the others holds and that own parameters; in their order."""
    whole = [m for m in modules if "_modules" in vars(m)]
    held = {id(child) for m in whole for child in m._modules.values() if child is not None}
    return [m for m in whole if id(m) not in held and any(True for _ in plainly.parameters(m))]


def living() -> list[Any]:
    """All modules that live."""
    from torch.nn import Module

    return _living(gc.get_objects(), Module)


def roots_owning(params: set[int]) -> list[Any]:
    """Module trees that own any of these parameters."""
    return [m for m in roots_among(living()) if any(id(p) in params for p in plainly.parameters(m))]


def _wrapped(module: Any) -> Any:
    """What a wrapper holds (under several names it may be: bare, and in another wrapper); `None` for any other module."""
    held = {slot: child for slot, child in module._modules.items() if child is not None}
    if not held or not all(is_wrapper_slot(slot) for slot in held):
        return None
    if any(t is not None for tensors in (module._parameters, module._buffers) for t in tensors.values()):
        return None
    children = list(held.values())
    if len(children) > 1 and len({id(unwrap(child)[0]) for child in children}) > 1:
        return None
    return children[0]


def _parallel(cls: type) -> str:
    for base in cls.__mro__:
        if base.__name__ == "DistributedDataParallel":
            return "ddp"
        if base.__name__ == "DataParallel":  # threads of one process
            return "dp"
        if base.__name__ == "FullyShardedDataParallel":
            return "fsdp"
        if base.__name__ == "FSDPModule":
            return "fsdp2"
    return ""
