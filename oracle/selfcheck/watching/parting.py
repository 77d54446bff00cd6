"""Where two evaluations part: the first operation of torch whose values differ where they should agree.

Both run under a dispatch mode that knows which module runs and which line of the program asked. What is compared of each tensor
says the relation (`Look`): the row of a sample, the positions before another. An operation that makes a tensor in which nothing
can be singled out (a mean over the batch) is remembered: if the first difference follows from it, it is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import proctor.instrument
import proctor.oracle
from proctor.oracle.selfcheck.outcomes import Culprit
from proctor.oracle.selfcheck.watching.step import Call
from proctor.oracle.selfcheck.watching.values import difference, unit

MAX_BYTES: Final = 256 * 1024 * 1024
MAX_OPS: Final = 20_000
APART: Final = 256.0  # unit roundoffs: what parts by more did not part by rounding

Look = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]  # what to compare; None: nothing can be told

_ROOMS: Final = tuple(str(Path(p)) + os.sep for p in (*proctor.oracle.__path__, *proctor.instrument.__path__))
SKIP: Final = (os.path.dirname(torch.__file__) + os.sep, *_ROOMS, "<frozen", "<string>")
_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep
_BLANK: Final = ("empty", "new_empty")


def program_line() -> str:
    """The innermost line of the program on the stack; "" where there is none."""
    return next(iter(program_stack(1)), "")


def program_stack(limit: int = 6) -> tuple[str, ...]:
    """Lines of the program on the stack, `file:line`, the innermost first."""
    frame = sys._getframe(1)
    out: list[str] = []
    while frame is not None and len(out) < limit:
        name = frame.f_code.co_filename
        if not name.startswith(SKIP) and (not name.startswith(_LIBRARY) or "site-packages" in name):
            out.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(out)


class Op(NamedTuple):
    """An operation of the first run: its name, the module in which it ran, the line, its results, and how many it read."""

    name: str
    module: str
    line: str
    results: tuple[torch.Tensor, ...]


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._log.saw(func.overloadpacket.__name__, (args, kwargs), result)
        return result


class _Log:
    """Runs a call and hears of each operation."""

    def __init__(self, call: Call) -> None:
        self.stack: list[str] = []
        self._hooks: list[Any] = []
        for name, module in call.module.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def run(self, function: Callable[[], Any]) -> None:
        """Call it under the mode; an exception is the program's."""
        try:
            with _Mode(self):
                function()
        finally:
            for hook in self._hooks:
                hook.remove()

    def saw(self, name: str, given: Any, result: Any) -> None:
        raise NotImplementedError

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any) -> None:
            self.stack.append(name)

        return hook

    def _leave(self, *_: Any) -> None:
        if self.stack:
            self.stack.pop()


class _First(_Log):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.ops: list[Op] = []
        self._bytes = 0

    def saw(self, name: str, given: Any, result: Any) -> None:
        made = tuple(t.detach().clone() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self._bytes += sum(t.numel() * t.element_size() for t in made)
        if self._bytes > MAX_BYTES or len(self.ops) >= MAX_OPS:
            raise MemoryError("too many operations to look at")
        self.ops.append(Op(name, self.stack[-1] if self.stack else "", program_line(), made))


class _Second(_Log):
    def __init__(self, call: Call, ops: list[Op], look: Look) -> None:
        super().__init__(call)
        self.found: Op | None = None
        self._ops, self._look, self._at = ops, look, 0
        self._mixed: dict[int, Op] = {}  # storage → operation after which nothing can be singled out
        self._alive: list[Any] = []  # memory that is not to be used again
        self._blank: dict[int, int] = {}  # storage → how many of its elements nobody has written yet

    def saw(self, name: str, given: Any, result: Any) -> None:
        if self.found is not None:
            return
        at, self._at = self._at, self._at + 1
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if at >= len(self._ops) or self._ops[at].name != name or len(made) != len(self._ops[at].results):
            here = Op(name, self.stack[-1] if self.stack else "", program_line(), ())
            self.found = self._source(given) or (self._ops[at] if at < len(self._ops) else here)  # another way through the program
            return
        op = self._ops[at]
        if self._unwritten(name, made):
            return
        for one, other in zip(op.results, made, strict=True):
            pair = self._look(one, other)
            self._keep(other)
            if pair is None:
                if one.shape != other.shape or self._parts(one, other):
                    self._mixed[_storage(other)] = self._source(given) or op
            elif self._parts(*pair):
                self.found = self._source(given) or op
                return
            else:
                self._mixed.pop(_storage(other), None)  # the same memory in a shape in which it can be told, and it has not parted

    def _unwritten(self, name: str, made: Sequence[torch.Tensor]) -> bool:
        """Whether results are memory, or views of memory, that nobody has written yet: what lies there is chance."""
        if name.startswith(_BLANK):
            for tensor in made:
                self._keep(tensor)
                self._blank[_storage(tensor)] = tensor.numel()
            return True
        blank = [s for t in made if (s := _storage(t)) in self._blank]
        if not blank or not name.endswith("_"):
            return bool(blank)
        for tensor in made:  # what an operation wrote in place is all written, its memory when nothing is left
            place = _storage(tensor)
            if self._blank.get(place, 1) <= tensor.numel():
                self._blank.pop(place, None)
            else:
                self._blank[place] -= tensor.numel()
        return False

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep its memory, not the tensor: a factory function copies what somebody else holds, and that is an operation more."""
        if tensor.layout == torch.strided:
            self._alive.append(tensor.untyped_storage())

    def _source(self, given: Any) -> Op | None:
        return next((o for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and (o := self._mixed.get(_storage(t))) is not None), None)

    @staticmethod
    def _parts(one: torch.Tensor, other: torch.Tensor) -> bool:
        error, size = difference(one, other)
        return error > (APART * unit(one) * size if one.is_floating_point() else 0.0)


def part(call: Call, one: Callable[[], Any], other: Callable[[], Any], look: Look, between: Callable[[], object] | None = None) -> Culprit | None:
    """The first operation whose values part.

    Args:
        call: whose module both evaluate.
        one, other: evaluations.
        look: what is to agree.
        between: is called after the first evaluation, unseen.

    Returns:
        module, operation and line; `None` where nothing was found, or too much would have to be kept.
    """
    first = _First(call)
    try:
        first.run(one)
    except Exception:  # noqa: BLE001 - the program's code under a mode that it may not bear
        return None
    if between is not None:
        between()
    second = _Second(call, first.ops, look)
    try:
        second.run(other)
    except Exception:  # noqa: BLE001
        if second.found is None:
            return None
    op = second.found
    return call.place(op.module, op.name, op.line) if op is not None else None


def everything(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A look at whole tensors."""
    return one, other


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else id(tensor)
