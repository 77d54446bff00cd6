"""Weak references to tensors of the program, of a kind that `torch.utils.swap_tensors` is not stopped by.

It refuses tensors that somebody refers to weakly: with DTensors (FSDP2, tensor parallelism), or `torch.__future__.set_swap_module_params_on_conversion`, a moved module (`model.cpu()`) ends there.
A reference is to the object of Python, which keeps its identity when contents are swapped, so that ours stay true. Those of the program stop it as before.
And what stands in for a parameter whose gradients are sparse, once a look has met one.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from proctor.instrument.observe.content import unseen
from proctor.instrument.observe.plainly import placed
from proctor.native import Slot

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


class SparseGradient:
    """Stands in for a parameter where its gradient is looked at: gives the values of a sparse one, which lie in memory as one block."""

    is_leaf = True

    def __init__(self, parameter: Callable[[], Any]) -> None:
        self._parameter = parameter

    def __call__(self) -> Any:
        return self if self._parameter() is not None else None

    @property
    def grad(self) -> Any:
        p = self._parameter()
        held = None if p is None else p.grad
        if held is None or placed(held):
            return held
        with unseen():
            values = held._values() if str(held.layout) == "torch.sparse_coo" else held.values() if str(held.layout).startswith("torch.sparse") else None
        return values


def by_values(p: Any, parameter: Callable[[], Any], slot: Slot) -> Slot | None:
    """The slot that takes the place of this one, of the gradient of `p`, where that is sparse and was not known to be.

    Args:
        p: the parameter, or None once it is gone.
        parameter: gives it.
        slot: of its gradient.
    """
    if p is None or not p.is_leaf or p.grad is None or placed(p.grad) or isinstance(slot.owner, SparseGradient):
        return None
    made = Slot(SparseGradient(parameter), slot.var, slot.meta, True, slot.at)
    made.twins.extend(slot.twins)
    return made
