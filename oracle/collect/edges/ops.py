"""Records the operations inside one module: what goes into each, what comes out, and the line of the program that asked for it.

Only the module's own code counts; what its children do is their business, so a child's outputs are sources and its inputs
are sinks. A dispatch mode sees every operation, also those of collectives and of autograd functions. In the backward pass
an operation belongs to the module if autograd runs it for an operation of its forward (their sequence numbers agree), and has
that one's line. Bounded: `MAX_OPS` operations, `MAX_BYTES` of results; then it stops, and says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.instrument.patch import replaced
from proctor.oracle.store.op_log import FILE, Op, OpLog

MAX_OPS: Final = 4000
MAX_BYTES: Final = 256 * 1024 * 1024
COLLECTIVES: Final = ("c10d", "_c10d_functional", "_dtensor")  # results are not there when the call returns

_SKIP: Final = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep, str(Path(replaced.__file__).parent) + os.sep, "<frozen")
_ENGINE: Final = os.path.join(os.path.dirname(torch.__file__), "autograd", "graph.py")  # runs the backward pass
_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep


class OpRecorder:
    """Operations of one module.

    Args:
        module: its name in this process.
        step: in which it is looked at.
        keep: stores a tensor of an operation: (tensor, number of the operation, place among its results, call).
    """

    def __init__(self, module: str, step: int, keep: Callable[[torch.Tensor, int, int, int], None]) -> None:
        self.module, self.step = module, step
        self.log = OpLog([], False, "")
        self._keep = keep
        self._mode = _Mode(self)
        self._running = False  # the module's forward is on the stack
        self._own = False  # … and none of its children's
        self._depth = 0
        self._call = 0
        self._backward = False
        self._children: dict[tuple[str, int], int] = {}  # name and call → call of the module
        self._calls: set[int] = set()
        self._made_by: dict[tuple[Any, ...], int] = {}  # a tensor's place in memory → operation
        self._written_by: dict[int, int] = {}  # a storage → operation that wrote into it
        self._pending: dict[int, tuple[int, int, torch.Tensor]] = {}  # storage → operation whose result is still on its way
        self._lines: dict[int, tuple[str, int]] = {}  # sequence number → line, call
        self._since = 0
        self._paused = False
        self._alive: list[torch.Tensor] = []  # memory that is not to be used again
        self._bytes = 0

    # -- edges ----------------------------------------------------------------------------------------------

    def entering(self, name: str, call: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """A module is called; its inputs are as the caller made them."""
        if not self._running:
            return
        self._own = False
        if self._depth == 0:
            self._children[name, call] = self._call
            self._edge("sink", "forward", "input", name, tensors)
        self._depth += 1

    def entered(self, name: str, call: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """… and its inputs are as it gets them."""
        if self._running or name != self.module or step != self.step or self.log.truncated:
            return
        self._running, self._call, self._depth = True, call, 0
        self._calls.add(call)
        self._edge("source", "forward", "input", name, tensors)
        self._mode.__enter__()
        self._resume()

    def leaving(self, name: str, call: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """A module returns what it made."""
        if self._running and self._depth == 0 and name == self.module and call == self._call:
            self._own = False
            self._edge("sink", "forward", "output", name, tensors)
            self.interrupt()

    def left(self, name: str, call: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """… and what its caller gets."""
        if self._running and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self._edge("source", "forward", "output", name, tensors)
                self._resume()

    def interrupt(self) -> None:
        """The module's forward is over, by its end or by an exception."""
        if self._running:
            self._running = self._own = False
            self._mode.__exit__(None, None, None)

    def crossed(self, side: str, name: str, slot: str, call: int, came: torch.Tensor, goes: torch.Tensor) -> None:
        """A gradient crosses an edge.

        Args:
            side: `output`, where it goes into the module, or `input`, where it comes out.
            came: as it arrives.
            goes: as it goes on.
        """
        mine = name == self.module and call in self._calls
        parent = self._children.get((name, call))
        if not self._backward or (not mine and parent is None):
            return
        self._call = call if parent is None else parent
        inwards = side == "output"
        if mine == inwards:
            self._edge("source", "backward", f"grad_{side}", name, {slot: goes})
        else:
            self._edge("sink", "backward", f"grad_{side}", name, {slot: came})

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        if self._running or self._backward or not self._lines:
            yield
            return
        self._backward = True
        try:
            with self._mode:
                yield
        finally:
            self._backward = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what the collector does by itself: that is no operation of the module."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self, folder: Path) -> None:
        """Write what is known of the operations."""
        self.interrupt()
        (folder / FILE).write_bytes(msgspec.json.encode(self.log))
        self._alive.clear()

    # -- operations -----------------------------------------------------------------------------------------

    def phase(self) -> str:
        """Of an operation that is about to run; "" if it is none of the module's."""
        if self._paused or self.log.truncated or self.log.error:
            return ""
        if self._own:
            return "forward"
        if self._backward:
            node = torch._C._current_autograd_node()
            line = self._lines.get(int(node._sequence_nr())) if node is not None else None
            if line is not None:
                self._call = line[1]
                return "backward"
        return ""

    def before(self, values: Any) -> None:
        """An operation is about to read these: results of collectives among them are there now."""
        if self._pending:
            for tensor in _tensors(values):
                found = self._pending.pop(_storage(tensor), None)
                if found is not None:
                    self._keep(found[2], found[0], found[1], self._call)

    def saw(self, phase: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation of the module ran."""
        read = list(_tensors((args, kwargs)))
        made = list(_tensors(result))
        collective = func.namespace in COLLECTIVES and "wait_tensor" not in str(func)
        written = read if func.namespace == "c10d" else _written(func, args, kwargs)
        made += [t for t in written if all(t is not m for m in made)]
        if phase == "forward":
            number, line = int(torch._C._autograd._get_sequence_nr()) - 1, _line()
            if number >= self._since:
                self._lines[number] = (line, self._call)
        else:
            node = torch._C._current_autograd_node()
            line = _line(within_backward=True) or self._lines[int(node._sequence_nr())][0]
        op = self._add("op", phase, f"{func.namespace}.{func.overloadpacket.__name__}", line, read, made, "", "", "")
        for place, tensor in enumerate(made):
            if collective:
                self._pending[_storage(tensor)] = (op, place, tensor)
            else:
                self._store(tensor, op, place)
        for tensor in written:
            self._written_by[_storage(tensor)] = op

    def _resume(self) -> None:
        self._since = int(torch._C._autograd._get_sequence_nr())
        self._own = True

    def _edge(self, what: str, phase: str, kind: str, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.log.truncated or self.log.error:
            return
        self.before(list(tensors.values()))
        for slot, tensor in tensors.items():
            plain = _plain(tensor.detach())
            op = self._add(what, phase, "", "", [plain] if what == "sink" else [], [plain], kind, name, slot, owns=what == "source")
            self._store(plain, op, 0)

    def _add(
        self, what: str, phase: str, label: str, line: str, read: list[torch.Tensor], made: list[torch.Tensor],
        kind: str, name: str, slot: str, *, owns: bool = True,
    ) -> int:  # fmt: skip
        number = len(self.log.ops)
        inputs = sorted({i for t in read if (i := self._maker(t)) >= 0})
        if number >= MAX_OPS:
            self.log.truncated = True
        self.log.ops.append(Op(number, what, phase, label, line, inputs, [list(t.shape) for t in made], kind, name, slot, self._call))
        if owns:
            for tensor in made:
                self._made_by[_place(tensor)] = number
        return number

    def _maker(self, tensor: torch.Tensor) -> int:
        return max(self._made_by.get(_place(tensor), -1), self._written_by.get(_storage(tensor), -1))

    def _store(self, tensor: torch.Tensor, op: int, place: int) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > MAX_BYTES:
            self.log.truncated = True
            self._alive.clear()
            return
        self._alive.append(tensor)
        self._keep(tensor, op, place, self._call)


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        phase = self._try(lambda: self._recorder.phase()) or ""
        if not phase:
            return func(*args, **kwargs)
        self._try(lambda: self._recorder.before((args, kwargs)))
        result = func(*args, **kwargs)
        self._try(lambda: self._recorder.saw(phase, func, args, kwargs, result))
        return result

    def _try(self, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except Exception as e:  # noqa: BLE001 - the user's program goes on
            self._recorder.log.error = f"{type(e).__name__}: {e}".splitlines()[0]
            return None


def _plain(tensor: Any) -> torch.Tensor:
    """What is in a DTensor, or on its way to a tensor that waits, without waiting."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    found: torch.Tensor = tensor.elem if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor
    return found


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield _plain(leaf)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    out: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            out += _tensors(value)
    return out


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _line(*, within_backward: bool = False) -> str:
    """The innermost line of the user's program on the stack; "" where there is none.

    Args:
        within_backward: above the call that started the backward pass: functions with a backward of their own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if within_backward and name == _ENGINE:
            return ""
        if not name.startswith(_SKIP) and (not name.startswith(_LIBRARY) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
