"""Writes a rank's step onto a tape: every operation below autograd, with its real arguments.

A dispatch mode, so ordinary `dist.*` calls, functional collectives, DTensor, FSDP2, DDP's buckets, autograd's own backward
and the optimizer are seen alike, in place and unchanged. Wrapper subclasses are let through first: what they do to plain
tensors is what is recorded. Driven by `session.py`; one a process and thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.prove.recording.before import Before
from proctor.oracle.prove.recording.operators import (
    COMPLEX_KINDS,
    FAKE,
    FRESH,
    PLAIN,
    RANDOM,
    Operator,
    array_of,
    counts,
    group_of,
    hidden,
    imagined,
    kernel,
    kind_of,
    operator,
    others,
    results,
    unreal,
    user_frame,
    whole,
    window_of,
    written,
)
from proctor.oracle.prove.tape import ABSENT, COMPLEX, MARK, READ, Array, Held, Leaf, Node, Tape, Window

_CONJUGATE: Final = torch.ops.aten.conj_physical.default
_NEGATIVE: Final = torch.ops.aten.neg.default
_COMMON: Final = frozenset({0.0, 1.0, -1.0, 0.5, 2.0})


# More than 25 methods: what becomes of one operation, on one table of storages.
class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """See the module. `on` is whether anything is recorded; `where()` gives (module, phase) of now."""

    def __init__(self, rank: int, world: int, where: Callable[[], tuple[str, str]], reduction: Callable[[], str], *, real: bool, before: Before | None = None) -> None:
        super().__init__()
        self.tape = Tape(rank, world)
        self.on = False
        self.real, self._before = real, before
        self._where, self._reduction = where, reduction
        self._storages: dict[int, tuple[int, Any]] = {}
        self._origin: dict[int, tuple[str, str]] = {}  # autograd's number → module and place of the forward
        self._read: dict[float, int] = {}
        self._decided: set[int] = set()  # storages of integers that computed floats went into
        self._counted: set[int] = set()  # storages of floats that were made of integers alone
        self._absent: set[int] = set()  # storages of floats that others' floats went into, which a fake process group does not carry
        self._beside: dict[int, int] = {}  # storages of integers that such floats gave beside floats, and were not used yet → node
        self._sent: dict[int, int] = {}  # storages of integers that others would have sent → node of the collective
        self._seen_plain: set[type] = set()
        if before is not None:
            before.also = self._read_whole

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Programs run uncompiled here, and torch's guard costs as much as an operation's record."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        odd = not self._seen_plain.issuperset(types)
        if odd and any(self._wraps(t) for t in types):
            return NotImplemented
        how = operator(func)
        if not self.on or how.silent or ((odd or "device" in kwargs) and unreal(types, kwargs)):
            return func(*args, **kwargs)
        if how.inner:
            with self:
                return kernel(func)(*args, **kwargs)
        if how.view and self._owned(args[0]):
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                return result  # else it has made a copy, and is done once more to be recorded
        if how.made_of is not None and not counts(args, kwargs):
            with self:
                result = how.made_of(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._record(func, how, args, kwargs)

    def _owned(self, t: Any) -> bool:
        """Whether a tensor's storage is known."""
        return isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in self._storages

    def _wraps(self, kind: type) -> bool:
        """Whether tensors of a type are wrappers of others."""
        found = hasattr(kind, "__tensor_flatten__")
        if not found and kind.__name__ != FAKE:
            self._seen_plain.add(kind)
        return found

    def _physical(self, value: Any) -> Any:
        """Tensors that are only marked as conjugates, or as negative, are made so by operations."""
        if isinstance(value, torch.Tensor):
            if value.is_conj():
                value = self._record(_CONJUGATE, operator(_CONJUGATE), (torch._conj(value),), {})
            return self._record(_NEGATIVE, operator(_NEGATIVE), (torch._neg_view(value),), {}) if value.is_neg() else value
        return type(value)(self._physical(v) for v in value) if isinstance(value, list | tuple) else value

    def _record(self, func: Any, how: Operator, args: Any, kwargs: Any) -> Any:
        name = how.name
        node = Node(name)
        ins: list[torch.Tensor] = []
        node.args = [self._plain(a, ins) for a in args]
        if kwargs:
            node.kwargs = {k: self._plain(v, ins) for k, v in kwargs.items()}
        unusual = False  # conjugates, complex numbers, tensors that are not there
        for t in ins:
            unusual = unusual or t.is_meta or t.dtype in COMPLEX_KINDS or t.is_neg() or type(t) not in PLAIN
        if unusual:
            if not how.view and any(t.is_conj() or t.is_neg() for t in ins):
                return self._record(func, how, self._physical(tuple(args)), {k: self._physical(v) for k, v in kwargs.items()})
            if any(imagined(t) for t in ins):
                return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        node.ins = taken = [self.window(t) for t in ins]
        result = func(*args, **kwargs)
        if how.writes:
            found = [*written(func, args, kwargs), *others(func, result)]
        else:
            found = [result] if isinstance(result, torch.Tensor) else [*results(result), *hidden(how.base, args)]
        outs = [t for t in found if t is not None]
        for t in outs:
            if t.is_meta or (type(t) not in PLAIN and imagined(t)):
                return result
            unusual = unusual or t.dtype in COMPLEX_KINDS
        if unusual and not how.talks and any(t.is_complex() for t in (*ins, *outs)):
            node.op = f"{COMPLEX}{name.partition('.')[2]}"
        if name == "aten._local_scalar_dense.default":
            return self._number(node, result)
        node.outs = made = [None if t is None else self._made(t) for t in found]
        if not how.writes and outs and all(w is None or any(w.storage == v.storage for v in taken) for w in made):
            return result  # a view
        base = how.base
        node.values = [-1 if t is None else self._value(t, how, node, w) for t, w in zip(found, made)]
        if how.talks:
            node.ranks, node.detail = group_of(args, kwargs), self._reduction()
            node.values = [-1] * len(found)
            self._counted.difference_update(w.storage for w in node.outs if w is not None)
            if not self.real:
                self._remember_sent(node, found)
        elif self._sent and (sent := self._sent_in(node.ins)) and max(node.values, default=-1) >= 0:
            self._use_sent(sent)
        if not outs and not name.startswith("c10d"):
            return result
        if kwargs and ("_out" in base or name.endswith("out")):
            node.kwargs.pop("out", None)
        if base in RANDOM and any(w.kind == "f" for w in made if w is not None):
            self.note(f"the random numbers that this run drew ({name})")
        self._locate(node)
        if self._beside:
            self._matter(taken)
        if how.takes:
            self._taint(node, how.talks and not self.real)
        self.tape.nodes.append(node)
        return result

    def _remember_sent(self, node: Node, found: list[Any]) -> None:
        """Integers that a collective of a fake process group left, to be compared with what it would have left."""
        for t, w in zip(found, node.outs):
            if w is not None and w.kind != "f":
                self.tape.sent.append((len(self.tape.nodes), w, self._block(array_of(t.detach()))))
                self._sent[w.storage] = len(self.tape.nodes)

    def _sent_in(self, windows: list[Window]) -> list[int]:
        return [self._sent[w.storage] for w in windows if w.storage in self._sent] if self._sent else []

    def _use_sent(self, nodes: list[int]) -> None:
        """Integers that others would have sent go into what is taken as it was recorded."""
        self.tape.counted += [(node, user_frame()) for node in nodes if all(node != k for k, _ in self.tape.counted)]

    def _read_whole(self, tensor: torch.Tensor) -> None:
        """The program takes the numbers of a tensor without an operator."""
        known = self._storages.get(tensor.untyped_storage()._cdata) if self.on and not hasattr(tensor, "__tensor_flatten__") and not imagined(tensor) else None
        if known is not None and known[0] in self._sent:
            self._use_sent([self._sent[known[0]]])

    def _taint(self, node: Node, talks: bool) -> None:
        absent, whole = talks, True  # of floats that are not there; nothing but floats is made
        if not talks and self._absent:
            for w in node.ins:
                if w.storage in self._absent:
                    absent = True
                    break
        for made in node.outs:
            if made is None:
                continue
            if made.kind == "f":
                if absent:
                    self._absent.add(made.storage)
                continue
            whole = False
            if any((w.kind == "f" and w.numel) or w.storage in self._decided for w in node.ins):
                self._decided.add(made.storage)
        if talks:
            self._absent.update(w.storage for w in node.ins if w.kind == "f")
        elif absent and not whole:
            self._imagine(node)

    def _imagine(self, node: Node) -> None:
        """Integers that come of floats that are not there. Those that come beside floats, such as where the largest is, count once they are used."""
        made = [w for w in node.outs if w is not None and w.kind != "f" and w.numel]
        if made and any(w is not None and w.kind == "f" for w in node.outs):
            self._beside.update({w.storage: len(self.tape.nodes) for w in made})
        elif made:
            self.tape.imagined.append(len(self.tape.nodes))

    def _matter(self, windows: list[Window]) -> None:
        for w in windows if self._beside else ():
            node = self._beside.pop(w.storage, None)
            if node is not None and node not in self.tape.imagined:
                self.tape.imagined.append(node)

    def _number(self, node: Node, result: Any) -> Any:
        """The program reads a number: it may use it later, or decide by it."""
        self._matter(node.ins)
        self._use_sent(self._sent_in(node.ins))
        if node.ins[0].kind == "f":
            node.op, node.outs = READ, []
            node.detail = ABSENT if node.ins[0].storage in self._absent else ""
            node.args = [float(result)]
            self._locate(node)
            if isinstance(result, float) and result not in _COMMON and np.isfinite(result):
                self._read.setdefault(result, len(self.tape.nodes))
            self.tape.nodes.append(node)
        elif node.ins[0].storage in self._decided and (place := user_frame()) not in self.tape.reads:
            self.tape.reads.append(place)
        return result

    def mark(self, what: str, tensor: torch.Tensor) -> None:
        """Remember what a tensor holds now."""
        self.tape.nodes.append(Node(MARK, ins=[self.window(tensor)], detail=what, phase=self._where()[1]))

    def hold(self, name: str, tensor: torch.Tensor, **placed: Any) -> None:
        """Remember a parameter by its name."""
        self.tape.held.append(Held(name, self.window(tensor), **placed))

    def forget(self) -> None:
        """Begin anew: what exists now is what the step begins with."""
        self.tape = Tape(self.tape.rank, self.tape.world)
        self._storages.clear()
        self._origin.clear()
        self._read.clear()
        self._decided.clear()
        self._counted.clear()
        self._absent.clear()
        self._beside.clear()
        self._sent.clear()

    def made(self, t: torch.Tensor) -> bool:
        """Whether a tensor's storage was made since recording began."""
        known = self._storages.get(t.untyped_storage()._cdata)
        return known is not None and all(leaf.storage != known[0] for leaf in self.tape.leaves)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.tape.notes:
            self.tape.notes.append(text)

    def window(self, t: torch.Tensor) -> Window:
        """The window of a tensor; a storage that nothing on the tape has made is a leaf, and is copied."""
        storage = t.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            known = self._own(storage)
            self.tape.leaves.append(Leaf(known[0], kind_of(t), self._block(whole(t)), len(self.tape.nodes)))
            if self._before is not None:
                self._before.rely(t)
        return window_of(known[0], t)

    def _made(self, t: torch.Tensor) -> Window:
        storage = t.untyped_storage()
        known = self._storages.get(storage._cdata) or self._own(storage)
        return window_of(known[0], t)

    def _own(self, storage: Any) -> tuple[int, Any]:
        made = (len(self._storages), storage)  # held, so that its address is not given away again
        self._storages[storage._cdata] = made
        return made

    def _value(self, t: torch.Tensor, how: Operator, node: Node, made: Any) -> int:
        """Slot of what a result is: of integers always, of floats when no float went into it."""
        if made.kind != "f":
            return self._block(array_of(t.detach()))
        base, computed = how.base, [w.storage for w in node.ins if w.kind == "f" and 0 not in w.size]
        if computed and how.known and how.plain and computed[0] not in self._counted:
            self._counted.discard(made.storage)
            return -1  # of most operations
        counted = base not in FRESH and self._counted.issuperset(computed) and not self._sent_in(node.ins)
        (self._counted.add if counted else self._counted.discard)(made.storage)
        known = bool(computed) and how.known  # such as a histogram of integers, for which there is no meaning
        return self._block(array_of(t.detach())) if (counted and not known) or (base in RANDOM and base not in FRESH) else -1

    def _block(self, array: Array) -> int:
        self.tape.blocks.append(array)
        return len(self.tape.blocks) - 1

    def _locate(self, node: Node) -> None:
        module, phase = self._where()
        current = torch._C._current_autograd_node()
        if current is not None:
            phase = "backward"
            module, node.place = self._origin.get(current._sequence_nr(), (module, ""))
            node.place = node.place or user_frame()  # of no forward, such as DDP's buckets: the line that calls backward
            node.seq = -1
        else:
            node.place = user_frame()
            node.seq = torch.autograd._get_sequence_nr() - 1
            if phase == "forward" and torch.is_grad_enabled() and node.seq >= 0:
                self._origin.setdefault(node.seq, (module, node.place))
        node.module, node.phase = module, phase

    def _plain(self, value: Any, ins: list[torch.Tensor]) -> Any:
        """An argument as the tape has it; tensors are added to `ins`."""
        if isinstance(value, torch.Tensor):
            ins.append(value)
            return {"c" if value.dtype in COMPLEX_KINDS else "t": len(ins) - 1}
        if value is None or isinstance(value, (int, str)):
            return value
        if isinstance(value, (list, tuple)):
            return list(value) if all(type(v) is int for v in value) else [self._plain(v, ins) for v in value]
        if isinstance(value, float):
            if value in self._read:
                return {"r": self._read[value], "v": value}
            return value if np.isfinite(value) else {"x": str(value)}
        if isinstance(value, complex):
            return {"z": [value.real, value.imag]}
        if isinstance(value, torch.dtype):
            return {"d": str(value)}
        return None
