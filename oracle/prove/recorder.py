"""Writes a rank's step onto a tape: every operation below autograd, with its real arguments.

A dispatch mode, so ordinary `dist.*` calls, functional collectives, DTensor, FSDP2, DDP's buckets, autograd's own backward
and the optimizer are seen alike, in place and unchanged. Wrapper subclasses are let through first: what they do to plain
tensors is what is recorded. Driven by `session.py`; one a process and thread.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.prove.tape import LITERAL, MARK, READ, Array, Held, Leaf, Node, Tape, Window

SILENT: Final = ("profiler.", "aten._assert", "aten.sym_", "prim.device", "aten.is_same_size", "aten.record_stream", "c10d.monitored_barrier", "_c10d_functional._wrap_tensor", "_c10d_functional.wait_tensor")
FRESH: Final = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"})
RANDOM: Final = frozenset({
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randperm", "normal", "normal_",
    "uniform_", "native_dropout", "multinomial", "exponential_", "random_",
})
_OWN: Final = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_LIBRARY: Final = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "<__array")
_COMMON: Final = frozenset({0.0, 1.0, -1.0, 0.5, 2.0})


class _Operator(NamedTuple):
    """What is known of an operator before it is called.

    Attributes:
        base: its name without namespace and overload.
        silent: not recorded.
        writes: into what it is given, or may, as collectives do.
        talks: with other ranks.
        known: has a meaning.
        view: gives a view of its first argument, which is its only tensor, where that can be.
        made_of: torch's decomposition, where there is no meaning for the whole.
    """

    name: str
    base: str
    silent: bool
    writes: bool
    talks: bool
    known: bool
    view: bool
    made_of: Callable[..., Any] | None


@functools.cache
def _operator(func: Any) -> _Operator:
    from proctor.oracle.prove.meanings import known

    name, schema = f"{func}", func._schema
    view = len(schema.returns) == 1 and schema.returns[0].alias_info is not None and not func._schema.is_mutable and [k for k, a in enumerate(schema.arguments) if "Tensor" in str(a.type)] == [0]
    talks = name.startswith(("c10d.", "_c10d_functional"))
    return _Operator(name, name.split(".")[1] if "." in name else name, name.startswith(SILENT), _writes(func), talks, known(name), view, _decompositions().get(func))


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """See the module. `on` is whether anything is recorded; `where()` gives (module, phase) of now."""

    def __init__(self, rank: int, world: int, where: Callable[[], tuple[str, str]], reduction: Callable[[], str], *, real: bool) -> None:
        super().__init__()
        self.tape = Tape(rank, world)
        self.on = False
        self.real = real
        self._where, self._reduction = where, reduction
        self._storages: dict[int, tuple[int, Any]] = {}
        self._origin: dict[int, tuple[str, str]] = {}  # autograd's number → module and place of the forward
        self._read: dict[float, int] = {}
        self._decided: set[int] = set()  # storages of integers that computed floats went into
        self._counted: set[int] = set()  # storages of floats that were made of integers alone
        self._absent: set[int] = set()  # storages of floats that others' floats went into, which a fake process group does not carry
        self._beside: dict[int, str] = {}  # storages of integers that such floats gave beside floats, and were not used yet: where
        self._seen_plain: set[type] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in self._seen_plain and self._wraps(t) for t in types):
            return NotImplemented
        how = _operator(func)
        if not self.on or how.silent or _unreal(types, kwargs):
            return func(*args, **kwargs)
        if how.name.startswith("fsdp."):
            with self:
                return _kernel(func)(*args, **kwargs)
        if how.view and self._owned(args[0]):
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                return result  # else it has made a copy, and is done once more to be recorded
        if how.made_of is not None:
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
        if not found:
            self._seen_plain.add(kind)
        return found

    def _record(self, func: Any, how: _Operator, args: Any, kwargs: Any) -> Any:
        name = how.name
        node = Node(name)
        ins: list[torch.Tensor] = []
        plain, named = [self._plain(a, ins) for a in args], {k: self._plain(v, ins) for k, v in kwargs.items()}
        if any(_imagined(t) for t in ins) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        node.args, node.kwargs = plain, named
        node.ins = [self.window(t) for t in ins]
        result = func(*args, **kwargs)
        found = [*_written(func, args, kwargs), *_others(func, result)] if how.writes else _results(result)
        outs = [t for t in found if t is not None]
        if any(_imagined(t) for t in outs):
            return result
        if name == "aten._local_scalar_dense.default":
            return self._number(node, result)
        if not how.writes and _view_of(outs, ins):
            return result
        base = how.base
        node.outs = [None if t is None else self._made(t) for t in found]
        node.values = [-1 if t is None else self._value(t, how, node, w) for t, w in zip(found, node.outs)]
        if how.talks:
            node.ranks, node.detail = _group(args, kwargs), self._reduction()
            node.values = [-1] * len(found)
            self._counted.difference_update(w.storage for w in node.outs if w is not None)
        if not outs and not name.startswith("c10d"):
            return result
        if "_out" in base or name.endswith("out"):
            node.kwargs.pop("out", None)
        if base in RANDOM and any(w.kind == "f" for w in node.outs if w is not None):
            self.note(f"the random numbers that this run drew ({name})")
        self._locate(node)
        self._matter(node.ins)
        if not base.startswith("new_") and (base in RANDOM or not base.endswith("_like")):  # these take a shape, not what is in it
            self._taint(node, how.talks and not self.real)
        self.tape.nodes.append(node)
        return result

    def _taint(self, node: Node, talks: bool) -> None:
        if any((w.kind == "f" and w.numel) or w.storage in self._decided for w in node.ins):
            self._decided.update(w.storage for w in node.outs if w is not None and w.kind != "f")
        if talks or any(w.storage in self._absent for w in node.ins):
            self._absent.update(w.storage for w in (*node.outs, *(node.ins if talks else ())) if w is not None and w.kind == "f")
            if not talks:
                self._imagine(node)

    def _imagine(self, node: Node) -> None:
        """Integers that come of floats that are not there. Those that come beside floats, such as where the largest is, count once they are used."""
        made = [w for w in node.outs if w is not None and w.kind != "f" and w.numel]
        if made and any(w is not None and w.kind == "f" for w in node.outs):
            self._beside.update({w.storage: node.place for w in made})
        elif made and node.place not in self.tape.imagined:
            self.tape.imagined.append(node.place)

    def _matter(self, windows: list[Window]) -> None:
        for w in windows:
            place = self._beside.pop(w.storage, None)
            if place is not None and place not in self.tape.imagined:
                self.tape.imagined.append(place)

    def _number(self, node: Node, result: Any) -> Any:
        """The program reads a number: it may use it later, or decide by it."""
        self._matter(node.ins)
        if node.ins[0].kind == "f":
            node.op, node.outs = READ, []
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
            self.tape.leaves.append(Leaf(known[0], _kind(t), self._block(_whole(t)), len(self.tape.nodes)))
        return Window(known[0], t.storage_offset(), tuple(t.shape), tuple(t.stride()), _kind(t))

    def _made(self, t: torch.Tensor) -> Window:
        storage = t.untyped_storage()
        known = self._storages.get(storage._cdata) or self._own(storage)
        return Window(known[0], t.storage_offset(), tuple(t.shape), tuple(t.stride()), _kind(t))

    def _own(self, storage: Any) -> tuple[int, Any]:
        made = (len(self._storages), storage)  # held, so that its address is not given away again
        self._storages[storage._cdata] = made
        return made

    def _value(self, t: torch.Tensor, how: _Operator, node: Node, made: Any) -> int:
        """Slot of what a result is: of integers always, of floats when no float went into it."""
        if made.kind != "f":
            return self._block(_array(t.detach()))
        base, computed = how.base, [w.storage for w in node.ins if w.kind == "f" and w.numel]
        counted = base not in FRESH and self._counted.issuperset(computed)
        (self._counted.add if counted else self._counted.discard)(made.storage)
        known = bool(computed) and how.known  # such as a histogram of integers, for which there is no meaning
        return self._block(_array(t.detach())) if (counted and not known) or (base in RANDOM and base not in FRESH) else -1

    def _block(self, array: Array) -> int:
        self.tape.blocks.append(array)
        return len(self.tape.blocks) - 1

    def _locate(self, node: Node) -> None:
        module, phase = self._where()
        current = torch._C._current_autograd_node()
        if current is not None:
            phase = "backward"
            module, node.place = self._origin.get(current._sequence_nr(), (module, ""))
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
            return {"t": len(ins) - 1}
        if value is None or isinstance(value, (int, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [self._plain(v, ins) for v in value]
        if isinstance(value, float):
            if value in self._read:
                return {"r": self._read[value], "v": value}
            return value if np.isfinite(value) else {"x": str(value)}
        if isinstance(value, torch.dtype):
            return {"d": str(value)}
        return None


def user_frame() -> str:
    """ "file:line function" of the innermost frame that is neither ours nor a library's; "" when there is none."""
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN):
            said = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
            if not any(library in path for library in _LIBRARY):
                return said
            fallback = fallback or said
        frame = frame.f_back
    return fallback


def _imagined(t: torch.Tensor) -> bool:
    return t.device.type == "meta" or type(t).__name__ == "FakeTensor"


def _unreal(types: Any, kwargs: Any) -> bool:
    return any(t.__name__ == "FakeTensor" for t in types) or ("device" in kwargs and str(kwargs["device"]).startswith("meta"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []


def _results(result: Any) -> list[torch.Tensor | None]:
    """Results by position: a gradient that nobody wants is None, and keeps its place."""
    if isinstance(result, torch.Tensor):
        return [result]
    if not isinstance(result, list | tuple):
        return []
    return [found for value in result for found in ([None] if value is None else _results(value))]


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable) or func.namespace == "c10d"


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written and func.namespace == "c10d" and "send" not in str(func):
            written = argument.name in ("tensors", "output_tensors", "output_tensor", "output", "tensor", "output_buffer")
        if written:
            found += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _others(func: Any, result: Any) -> list[torch.Tensor]:
    """Results of a writing operation that are not what it writes to."""
    values = result if isinstance(result, list | tuple) else [result]
    returns = func._schema.returns
    if func.namespace == "c10d" or len(returns) != len(values):
        return []
    return [t for r, v in zip(returns, values) if r.alias_info is None for t in _tensors(v)]


def _view_of(outs: list[torch.Tensor], ins: list[torch.Tensor]) -> bool:
    there = {t.untyped_storage()._cdata for t in ins}
    return bool(outs) and all(t.untyped_storage()._cdata in there for t in outs)


def _kind(t: torch.Tensor) -> str:
    if t.dtype == torch.bool:
        return "b"
    return "f" if t.dtype.is_floating_point or t.dtype.is_complex else "i"


def _array(t: torch.Tensor) -> Array:
    if t.dtype in (torch.bfloat16, torch.float16) or (t.dtype.is_floating_point and t.element_size() < 4):
        t = t.to(torch.float32)
    array: Array = t.contiguous().cpu().numpy().reshape(-1).copy()
    return array


def _whole(t: torch.Tensor) -> Array:
    storage = t.untyped_storage()
    count = storage.nbytes() // t.element_size()
    return _array(torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, (count,), (1,)))


def _kernel(func: Any) -> Any:
    """The implementation of a library's own operator, whose inner operations are then seen."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)

    return call


def _group(args: Any, kwargs: Any) -> tuple[int, ...]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    names = [v for v in (*args, *kwargs.values()) if isinstance(v, str)]
    return tuple(dist.get_process_group_ranks(_resolve_process_group(names[-1]))) if names else ()


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Operators that are recorded as what torch says they are made of, since we have no meaning for the whole."""
    from torch._decomp import core_aten_decompositions

    from proctor.oracle.prove.meanings import known

    table = core_aten_decompositions()
    return {op: how for op, how in table.items() if hasattr(op, "_schema") and not known(str(op)) and str(op).split(".")[1] not in RANDOM}


__all__ = ["LITERAL", "Recorder", "user_frame"]
