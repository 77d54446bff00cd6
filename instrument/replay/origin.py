"""Where the first NaN or infinity of a step comes from: the operation, its line and module, and which of its inputs had what.

One step, done again from its capsule, is run with every operation of torch seen (`TorchDispatchMode`, forward and backward). What an
operation gives that is not finite is noted with the note of the input that was not finite, so that a parameter, gradient or loss that ends
not finite has a chain back to its origin. An infinity that nobody is harmed by (a mask of attention) is in no such chain. Memory that was
never written (`empty`) counts as nothing.

In: the tracked names. Out: an `Origin`. Costs a pass over every result, and waits for devices: for a re-execution only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proctor.instrument.replay.plan import Link, Origin

_BLANK: Final = ("empty", "new_empty", "resize_", "set_", "detach", "view", "_unsafe_view", "alias", "t", "transpose", "expand", "slice", "select", "permute")
_SHOWN: Final = 8  # inputs of an operation, and links of a chain


class _Note:
    """Of a result that is not finite."""

    __slots__ = ("backward", "frame", "function", "gave", "inputs", "module", "number", "outside", "parent")

    backward: bool
    frame: str
    function: str
    gave: str
    inputs: tuple[str, ...]
    module: str

    def __init__(self, number: int, parent: _Note | None, outside: str) -> None:
        self.number, self.parent, self.outside = number, parent, outside


class OriginMode(TorchDispatchMode):  # type: ignore[misc]  # torch does not say its type
    """Sees the operations of one step.

    Args:
        names: by id of a parameter or buffer.
        modules: by id of a module.
        is_theirs: whether a source file is the program's.
    """

    def __init__(self, names: dict[int, str], modules: dict[int, str], is_theirs: Callable[[str], bool]) -> None:
        super().__init__()
        self._modules, self._is_theirs = modules, is_theirs
        self._names: dict[int, str] = names
        self._notes: dict[int, _Note] = {}  # by address of the storage
        self._kept: list[Any] = []  # storages that are noted, so that no other gets their address
        self._stack: list[str] = []
        self._number = 0
        self._handles: list[Any] = []
        self._places: dict[int, str] = {}

    def begin(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """The step begins.

        Args:
            tensors: id and tensor of what has a name.
        """
        self._places = {_address(t): self._names.get(key, "") for key, t in tensors}
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enters),
            hooks.register_module_forward_hook(self._leaves, always_call=True),
        ]
        self._anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)  # keeps the forward's lines for the backward's operations
        self.__enter__()

    def _enters(self, module: Any, args: Any) -> None:
        self._stack.append(self._modules.get(id(module), type(module).__name__))

    def _leaves(self, module: Any, args: Any, result: Any) -> None:
        if self._stack:
            self._stack.pop()

    def end(self, ends: Iterable[tuple[str, Any]]) -> Origin:
        """The step is over.

        Args:
            ends: name and tensor, in the order in which they are made.
        """
        self.__exit__(None, None, None)
        self._anomaly.__exit__()
        for handle in self._handles:
            handle.remove()
        for name, tensor in ends:
            if tensor is not None and not _is_finite(tensor):
                note = self._notes.get(_address(tensor))
                return self._told(name, note) if note is not None else Origin(name, (), name)
        return Origin()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        bad = [t for t in given if not _is_finite(t)]
        before = [_told(t) for t in given[:_SHOWN]] if bad or any(t.is_floating_point() for t in given) else []
        result = func(*args, **kwargs)
        self._number += 1
        name = func.overloadpacket.__name__
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not name.startswith(("empty", "new_empty")):
                self._see(func, name, made, bad, before)
        return result

    def _see(self, func: Any, name: str, made: Any, bad: list[Any], before: list[str]) -> None:
        address = _address(made)
        if _is_finite(made):
            self._notes.pop(address, None) if made.numel() * made.element_size() == made.untyped_storage().nbytes() else None
            return
        if address in self._notes and any(_address(t) == address for t in bad) and name in _BLANK:
            return  # the same memory, seen in another way
        parent = next((self._notes[_address(t)] for t in bad if _address(t) in self._notes), None)
        outside = ""
        if bad and parent is None:
            outside = next((self._places.get(_address(t), "") for t in bad if self._places.get(_address(t))), "") or "an input of the step"
        note = _Note(self._number, parent, outside)
        node = torch._C._current_autograd_node()
        note.backward = node is not None
        note.function, note.inputs, note.gave = str(func), tuple(before), _told(made)
        note.module = self._stack[-1] if self._stack else ""
        note.frame = self._line_of(node)
        self._notes[address] = note
        self._kept.append(made.untyped_storage())

    def _line_of(self, node: Any) -> str:
        for text in reversed((node.metadata or {}).get("traceback_", [])) if node is not None else ():
            file, _, rest = text.strip().removeprefix('File "').partition('", line ')
            if self._is_theirs(file):
                return f"{file}:{rest.partition(',')[0]}"
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_theirs(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _told(self, end: str, note: _Note) -> Origin:
        chain = []
        at: _Note | None = note
        first = note
        while at is not None:
            chain.append(Link(at.number, at.function, at.frame, at.module, at.backward, at.inputs, at.gave))
            first, at = at, at.parent
        chain.reverse()
        shown = chain if len(chain) <= _SHOWN else [*chain[: _SHOWN - 2], *chain[-2:]]
        return Origin(end, tuple(shown), first.outside)


def _address(tensor: Any) -> int:
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _is_finite(tensor: Any) -> bool:
    local = getattr(tensor, "_local_tensor", tensor)
    if not (local.is_floating_point() or local.is_complex()) or local.is_meta or local.layout is not torch.strided or not local.numel():
        return True
    return bool(torch.isfinite(local.detach()).all())


def _told(tensor: Any) -> str:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    head = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    if not local.is_floating_point() or not local.numel() or local.is_meta or local.layout is not torch.strided:
        return head
    nan, infinite = int(torch.isnan(local).sum()), int(torch.isinf(local).sum())
    finite = local[torch.isfinite(local)].double()
    span = f" from {finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else ""
    return head + span + (f", {nan} NaN" if nan else "") + (f", {infinite} infinite" if infinite else "")
