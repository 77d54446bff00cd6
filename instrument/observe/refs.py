"""Weak references to tensors of the program, of a kind that `torch.utils.swap_tensors` is not stopped by.

It refuses tensors that somebody refers to weakly: with DTensors (FSDP2, tensor parallelism), or `torch.__future__.set_swap_module_params_on_conversion`, a moved module (`model.cpu()`) ends there.
A reference is to the object of Python, which keeps its identity when contents are swapped, so that ours stay true. Those of the program stop it as before.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
_MODULE: Final = "weakref"


class TensorRef(weakref.ref[T]):
    """A weak reference of ours: to tell it from others it is of a class of its own."""

    __slots__ = ()


class _Others(types.ModuleType):
    """What `weakref` is for who asks here: it does not name references of ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(of: Any) -> list[Any]:
        return [ref for ref in weakref.getweakrefs(of) if type(ref) is not TensorRef]


_OTHERS: Final = _Others(_MODULE)


def swapping(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `torch.utils.swap_tensors`: as if nobody of ours referred to its tensors."""
    names = getattr(original, "__globals__", {})
    if names.get(_MODULE) is not weakref:  # nested, or another version of torch
        return original(*args, **kwargs)
    names[_MODULE] = _OTHERS
    try:
        return original(*args, **kwargs)
    finally:
        names[_MODULE] = weakref
