"""What ranks of a world that is not there would have sent each other before the step, and where what they sent goes on.

A fake process group moves nothing: a tensor that is broadcast, added up or gathered before the step holds the rank's own numbers, and what is
made of them is made up. So each such collective is kept with what the rank gave and what it was left with, and storages are followed that its
result went into. Once all ranks are recorded, `made_up.py` says which collectives would have given something else. What a rank of a lower
number broadcasts is given to those that come after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.prove.recording.operators import (
    RANDOM,
    array_of,
    group_of,
    imagined,
    kind_of,
    operator,
    others,
    results,
    tensors,
    unreal,
    user_frame,
    written,
)
from proctor.oracle.prove.tape import Array, Event, Node, Tape, contiguous

_MOST: int = 1 << 22  # elements of one collective that are kept
_REPLACING = frozenset({"copy_", "zero_", "fill_"}) | RANDOM
_READERS = ("tolist", "numpy")


class Before(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """See the module.

    Args:
        rank, world: of this process.
        reduction: of the collective that is called.
        earlier: tapes of ranks of lower numbers.

    Attributes:
        events: collectives of more than one rank, in order.
        relied: (event, where its result was used).
        also: is called with every tensor that is read without an operator.
    """

    def __init__(self, rank: int, world: int, reduction: Callable[[], str], earlier: Sequence[Tape] = ()) -> None:
        super().__init__()
        self.rank, self.world, self._reduction, self._earlier = rank, world, reduction, earlier
        self.events: list[Event] = []
        self.relied: list[tuple[int, str]] = []
        self.on = True
        self._of: dict[int, tuple[frozenset[int], Any]] = {}  # by storage, which is held, so that its address is not given away again
        self._turn: dict[tuple[int, ...], int] = defaultdict(int)
        self.also: Callable[[Any], None] | None = None

    def follow(self) -> Callable[[], None]:
        """Begin to look, also at what is read without an operator; what is returned ends that."""
        self.__enter__()
        originals = {name: getattr(torch.Tensor, name) for name in _READERS}
        for name, original in originals.items():
            setattr(torch.Tensor, name, self._reading(original))

        def undo() -> None:
            for name in _READERS:
                if name in torch.Tensor.__dict__:
                    delattr(torch.Tensor, name)

        return undo

    def _reading(self, original: Any) -> Any:
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.rely(tensor)
            if self.also is not None:
                self.also(tensor)
            return original(tensor, *args, **kwargs)

        return read

    def leave(self) -> None:
        """End."""
        self.on = False
        if torch.utils._python_dispatch._get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def rely(self, tensor: Any, place: str = "") -> None:
        """A step begins with a tensor, or the program reads it."""
        if not self._of or hasattr(tensor, "__tensor_flatten__") or imagined(tensor):
            return
        for event in sorted(self._events_in(tensor)):
            if all(event != k for k, _ in self.relied):
                self.relied.append((event, place or user_frame()))

    def _events_in(self, tensor: torch.Tensor) -> frozenset[int]:
        try:
            return self._of.get(tensor.untyped_storage()._cdata, (frozenset(), None))[0]
        except (RuntimeError, NotImplementedError):  # a kind of tensor that has no storage
            return frozenset()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Programs run uncompiled here, and torch's guard costs as much as an operation's record."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        if not self.on or unreal(types, kwargs):
            return func(*args, **kwargs)
        how = operator(func)
        if how.talks and not how.silent:
            return self._collective(func, how.name, args, kwargs)
        result = func(*args, **kwargs)
        if self._of and not how.silent:
            self._flow(func, how.base, how.writes, (args, kwargs), result)
        return result

    def _flow(self, func: Any, base: str, writes: bool, given: Any, result: Any) -> None:
        ins = tensors(given)
        if base == "_local_scalar_dense":
            self.rely(ins[0])
            return
        outs = written(func, *given) if writes else [t for t in results(result) if t is not None]
        taken = [t for t in ins if all(t is not o for o in outs)] if base in _REPLACING else ins
        events = frozenset().union(*(self._events_in(t) for t in taken)) if base not in RANDOM else frozenset()
        for t in [*outs, *(others(func, result) if writes else [])]:
            whole = base in _REPLACING and t.untyped_storage().nbytes() == t.numel() * t.element_size()
            self._set(t, events if whole or not writes else events | self._events_in(t))

    def _set(self, tensor: torch.Tensor, events: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        if events:
            self._of[storage._cdata] = events, storage
        elif storage._cdata in self._of:
            del self._of[storage._cdata]

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        group = group_of(args, kwargs)
        node, ins, blocks = Node(name, ranks=group, place=user_frame()), [], []

        def plain(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                ins.append(value)
                node.ins.append(contiguous(len(node.ins), _shape(value), kind_of(value)))
                blocks.append(array_of(value.detach()) if value.numel() <= _MOST else np.zeros(0))
                return {"t": len(ins) - 1}
            if isinstance(value, list | tuple):
                return [plain(v) for v in value]
            return value if value is None or isinstance(value, int | str) else None

        node.args = [plain(a) for a in args]
        result = func(*args, **kwargs)
        node.detail = self._reduction()
        turn = self._turn[group]
        self._turn[group] += 1
        if len(group) < 2:
            return result
        outs = written(func, args, kwargs) if operator(func).writes else [t for t in results(result) if t is not None]
        self._deliver(node, turn, outs)
        events = frozenset({len(self.events)}).union(*(self._events_in(t) for t in ins))
        left: list[tuple[int, Array]] = []
        for t in outs:
            at = next((k for k, i in enumerate(ins) if i is t), -1)
            if at < 0:
                at = len(node.ins) + len(node.outs)
                node.outs.append(contiguous(at, _shape(t), kind_of(t)))
            left.append((at, array_of(t.detach()) if t.numel() <= _MOST else np.zeros(0)))
            self._set(t, events)
        self.events.append(Event(node, turn, blocks, left))
        return result

    def _deliver(self, node: Node, turn: int, outs: Sequence[torch.Tensor]) -> None:
        """What the root of a broadcast gave, where it was recorded before."""
        if node.op.split(".")[1] != "broadcast_":
            return
        root = node.ranks[int(node.args[2])]
        if root >= self.rank or root >= len(self._earlier):
            return
        there = next((e for e in self._earlier[root].before if e.turn == turn and e.node.ranks == node.ranks and e.node.op == node.op), None)
        if there is not None and len(there.given) == len(outs) and all(g.size == t.numel() for g, t in zip(there.given, outs)):
            with torch.no_grad():
                for given, t in zip(there.given, outs):
                    t.copy_(torch.from_numpy(given.copy()).reshape(t.shape))


def _shape(t: torch.Tensor) -> tuple[int, ...]:
    return (*t.shape, 2) if t.is_complex() else tuple(t.shape)
