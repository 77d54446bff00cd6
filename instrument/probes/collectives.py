"""What each rank gives to a collective, in which order, and what it gets back.

One SENT row a call, written *before* it runs, so that a call that never returns leaves its row: `place` says function,
group, operation and root (`invariants.collective`), `item` is how many calls this process made on the group before.
RECEIVED holds what small results of synchronous calls hash to; GIVEN and GOT their pieces for and from each rank (`_pieces`). Calls that are open for longer than a second are facts
of the process (`open` in process.json), which is how a reader sees a job that hangs.

Nothing is waited for: results of asynchronous calls are not read, and tensors that are large or not on the CPU are
described and not hashed. Cost of a call: 10 µs, and 8 µs for each tensor that is hashed.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, _pieces, register
from proctor.invariants.codec import collective
from proctor.invariants.schema import Name, Value

OPEN_AFTER_S: Final = 1.0  # a call that lasts longer is told to readers
MAX_HASHED_BYTES: Final = 1 << 18  # results up to this are hashed, 30 µs at 8 GB/s
MAX_SENT_BYTES: Final = 1 << 16  # of what is sent the same, which tells by its content which variable it is
MAX_HASHED_A_STEP: Final = 256  # tensors, 8 µs each
_MAX_OPEN: Final = 16
_MAX_TEXTS: Final = 4096  # texts of calls that are remembered
_PASSED: Final = frozenset({"torch", "proctor", "functools", "contextlib", "threading"})  # their functions are not the caller
_PREFIX: Final = "torch.distributed."
# The argument that describes the call: all members give one of the same dtype and, mostly, of the same shape.
_SUBJECT: Final = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor", "gather": "tensor",
    "scatter": "tensor", "all_gather_into_tensor": "input_tensor", "reduce_scatter": "output",
    "reduce_scatter_tensor": "output", "all_to_all": "input_tensor_list", "all_to_all_single": "input",
    "all_reduce_coalesced": "tensors", "all_gather_coalesced": "input_tensor_list",
    "send": "tensor", "recv": "tensor", "isend": "tensor", "irecv": "tensor",
}  # fmt: skip
# What every member holds after it, with the same bits.
_RESULT: Final = {"all_reduce": "tensor", "broadcast": "tensor", "all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor"}
_DDP: Final = "torch.nn.parallel.DistributedDataParallel.__init__"
_BACKWARD: Final = ("torch.Tensor.backward", "torch.autograd.backward")
_SENDERS: Final = ("send", "isend")
_RECEIVERS: Final = ("recv", "irecv")
_NAMES: Final = (
    *_SUBJECT, "barrier", "monitored_barrier",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
)  # fmt: skip


class _Arguments:
    """Finds arguments of one function by name, without binding."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        self.name = name
        function = getattr(dist, name, None)
        self._at = {p: i for i, p in enumerate(inspect.signature(function).parameters)} if function else {}

    def knows(self, name: str) -> bool:
        return name in self._at

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, name: str) -> Any:
        if kwargs and name in kwargs:
            return kwargs[name]
        at = self._at.get(name)
        return args[at] if at is not None and at < len(args) else None


class _Members(NamedTuple):
    name: str
    ranks: tuple[int, ...]


class _Where(NamedTuple):
    """Whom a call concerns, in ranks of the world; `None`: nobody."""

    ranks: tuple[int, ...]
    me: int
    root: int | None
    peer: int | None


class _Open:
    """A collective that has begun and not returned."""

    __slots__ = ("began_ns", "call", "name", "ordinal", "place", "thread", "where")

    def __init__(
        self, name: str, place: str, where: _Where | None, ordinal: int, call: int, thread: int | None = None, began_ns: int | None = None
    ) -> None:
        self.name, self.place, self.where, self.ordinal, self.call = name, place, where, ordinal, call
        self.thread = threading.get_ident() if thread is None else thread
        self.began_ns = time.monotonic_ns() if began_ns is None else began_ns


@register
class Collectives(Probe):
    """Order, arguments and results of collectives."""

    name = "collectives"
    kinds = frozenset({Value.SENT, Value.RECEIVED, Value.GIVEN, Value.GOT})
    steady: ClassVar[bool] = True  # calls are counted in steps that are not sampled, too

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._texts: dict[tuple[Any, ...], str] = {}
        self._count: dict[str, int] = {}  # calls by channel
        self._hashed = 0  # tensors in this step
        self._open: dict[int, _Open] = {}  # by thread: the outermost one
        self._libraries = tuple(library_prefixes())
        self._backward: dict[int, _Open] = {}  # by thread: the outermost backward of a program that has DDP
        self._asleep = {sink.recorder.intern(int(Name.FUNCTION), f"{_PREFIX}{name}"): name for name in _NAMES}  # by code, for calls without hooks
        self._wrapped = False  # a model is in DistributedDataParallel, whose backward is a collective

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _DDP:
            return None, self._wraps
        if function in _BACKWARD:
            return self._backward_begins, self._backward_ends
        name = function.removeprefix(_PREFIX)
        if home is not Home.TORCH or not function.startswith(_PREFIX) or name not in _NAMES:
            return NO_HOOKS
        arguments = _Arguments(name)

        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            self._begins(arguments, args, kwargs)

        def after(args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
            self._ends(arguments, args, kwargs, raised)

        return before, after

    def step_begins(self, step: int) -> None:
        self._hashed = 0

    def facts(self) -> dict[str, Any]:
        """`open`: collectives that do not return, and `clock`, the time at which that was so (ns, CLOCK_MONOTONIC)."""
        now = time.monotonic_ns()
        waiting = [o for o in (*list(self._open.values()), *list(self._backward.values()), *self._noted()) if now - o.began_ns >= OPEN_AFTER_S * 1e9]
        if not waiting:
            return {}
        frames = sys._current_frames()
        said = [
            {
                "call": o.call, "place": o.place, "item": o.ordinal, "since": o.began_ns,
                "site": _site(frames.get(o.thread), self._libraries),
            }
            for o in waiting[:_MAX_OPEN]
        ]  # fmt: skip
        return {"open": said, "clock": now}

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return
        if self._wrapped:
            self._count["backward"] = self._count.get("backward", 0) + backwards
        for group, number in collectives:
            known = dist.distributed_c10d._get_default_group() if group is None else group
            if hasattr(known, "group_name"):
                channel = str(known.group_name)
                self._count[channel] = self._count.get(channel, 0) + number

    def _noted(self) -> list[_Open]:
        """What is open while no hook runs; asked by the writer's thread."""
        backward, ident, calls = self.sink.recorder.open_acts()
        found = []
        if backward and self._wrapped:
            found.append(_Open("backward", self._backward_place(), None, self._count.get("backward", 0), 0, ident, backward))
        for code, args, names, since, thread in calls:
            name = self._asleep.get(code)
            if name is None or args is None:
                continue
            count = len(args) - len(names or ())
            at, frame = _Arguments(name), sys._current_frames().get(thread)
            place = self._place(at, args[:count], dict(zip(names or (), args[count:])), frame)
            if place is not None:
                found.append(_Open(name, place[0], place[2], self._count.get(place[1], 0), 0, thread, since))
        return found

    # -- DistributedDataParallel, which reduces inside backward -----------------------------------------------

    def _wraps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._wrapped = self._wrapped or not raised

    def _backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        thread = threading.get_ident()
        if not self._wrapped or thread in self._backward:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        place = self._backward_place()
        ordinal = self._count.get("backward", 0)
        self._count["backward"] = ordinal + 1
        self._backward[thread] = _Open("backward", place, None, ordinal, self.sink.call)
        if self.sink.live and self.sink.config.keeps(Value.SENT):
            self.sink.fingerprint(Value.SENT, place, 0, item=ordinal)

    def _backward_place(self) -> str:
        import torch.distributed as dist

        return collective.text("backward", collective.Group("backward", collective.ranks_text(tuple(range(dist.get_world_size())))))

    def _backward_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        mine = self._backward.get(threading.get_ident()) if self._backward else None
        if mine is not None and (mine.call == self.sink.call or not self.sink.live):
            del self._backward[threading.get_ident()]

    # -- one call -----------------------------------------------------------------------------------------

    def _begins(self, at: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        thread = threading.get_ident()
        if thread in self._open:  # inside another one, which says it all
            return
        place = self._place(at, args, kwargs)
        if place is None:
            return
        text, channel, where = place
        ordinal = self._count.get(channel, 0)
        self._count[channel] = ordinal + 1
        mine = self._open[thread] = _Open(at.name, text, where, ordinal, self.sink.call)
        if not self.sink.live or not self.sink.config.keeps(Value.SENT):
            return
        tensor = _first(at.get(args, kwargs, _SUBJECT.get(at.name, "")))
        if tensor is None:
            self.sink.fingerprint(Value.SENT, text, 0, item=ordinal)
        elif self._hashed < MAX_HASHED_A_STEP and _bytes(tensor) <= MAX_SENT_BYTES:
            self._hashed += 1
            self.sink.tensors(Value.SENT, [(text, ordinal, tensor)])
        else:
            self.sink.description(Value.SENT, text, tensor, item=ordinal)
        if self.sink.config.keeps(Value.GIVEN):
            self._pieces(Value.GIVEN, mine, _pieces.given(at.name, lambda n: at.get(args, kwargs, n), *where), MAX_SENT_BYTES)

    def _pieces(self, kind: Value, mine: _Open, pieces: list[_pieces.Piece], limit: int) -> None:
        """One row a piece: its fingerprint, or its projection where sums are compared."""
        if not pieces or self._hashed + len(pieces) > MAX_HASHED_A_STEP or sum(_bytes(p.tensor) for p in pieces) > limit:
            return
        self._hashed += len(pieces)
        if _pieces.sums(mine.name):
            for peer, tensor in pieces:
                found = _pieces.projection(tensor)
                if found is not None:
                    facts = {"peer": str(peer), "dtype": str(tensor.dtype).removeprefix("torch.")}
                    self.sink.measured(kind, mine.place, facts, (0, found[1], 0), found[0], item=mine.ordinal, call=mine.call)
            return
        for (peer, tensor), summary in zip(pieces, fingerprint_all([p.tensor for p in pieces])):
            facts = {"peer": str(peer), "dtype": str(tensor.dtype).removeprefix("torch.")}
            self.sink.measured(kind, mine.place, facts, summary, math.nan, item=mine.ordinal, call=mine.call)

    def _ends(self, at: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any] | None, raised: bool) -> None:
        thread = threading.get_ident()
        mine = self._open.get(thread)
        if mine is None or (mine.call != self.sink.call and self.sink.live) or mine.name != at.name:
            return
        del self._open[thread]
        if raised or not self.sink.live or at.get(args, kwargs, "async_op") or _pieces.coalesced():
            return
        if self.sink.config.keeps(Value.GOT) and mine.where is not None:
            self._pieces(Value.GOT, mine, _pieces.got(at.name, lambda n: at.get(args, kwargs, n), *mine.where), MAX_HASHED_BYTES)
        if not self.sink.config.keeps(Value.RECEIVED) or at.name not in _RESULT:
            return
        result = at.get(args, kwargs, _RESULT[at.name])
        tensors = list(result) if isinstance(result, list | tuple) else [result]
        if not tensors or self._hashed >= MAX_HASHED_A_STEP or sum(_bytes(t) for t in tensors) > MAX_HASHED_BYTES:
            return
        self._hashed += 1
        summaries = fingerprint_all(tensors)
        whole = sum(s.fp * (2 * i + 1) for i, s in enumerate(summaries)) % (1 << 64)
        self.sink.fingerprint(Value.RECEIVED, mine.place, whole, item=mine.ordinal, call=mine.call)

    def _place(
        self, at: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any] | None, frame: FrameType | None = None
    ) -> tuple[str, str, _Where] | None:
        """Text of a call, and of the sequence it belongs to, and whom it concerns; `None` where this rank takes no part."""
        import torch.distributed as dist

        group = at.get(args, kwargs, "group")
        group = dist.distributed_c10d._get_default_group() if group is None else group
        if not hasattr(group, "group_name"):  # not a member
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        me = dist.get_rank()
        known = _Members(str(group.group_name), ranks)
        caller = _caller(frame or sys._getframe())
        if at.name in _SENDERS or at.name in _RECEIVERS:
            end = "dst" if at.name in _SENDERS else "src"
            peer = _global(ranks, at.get(args, kwargs, end), at.get(args, kwargs, f"group_{end}"))
            tag = at.get(args, kwargs, "tag") or 0
            way = (me, peer) if end == "dst" else (peer, me)
            text = self._text(at.name, known, "", None, peer, tag, caller)
            return text, f"{known.name} {way} {tag}", _Where(ranks, me, None, peer)
        root = None
        for end in ("src", "dst"):
            if at.knows(end):
                root = _global(ranks, at.get(args, kwargs, end), at.get(args, kwargs, f"group_{end}"))
                root = ranks[0] if root is None else root
        op = str(at.get(args, kwargs, "op") or "SUM") if at.knows("op") else ""
        op = op.rpartition(".")[2].split(":")[0]
        return self._text(at.name, known, op, root, None, 0, caller), known.name, _Where(ranks, me, root, None)

    def _text(self, *said: Any) -> str:
        text = self._texts.get(said)
        if text is None:
            name, (group, ranks), op, root, peer, tag, caller = said
            known = collective.Group(group, collective.ranks_text(ranks))
            text = collective.text(name, known, op=op, root=root, peer=peer, tag=tag, caller=caller)
            if len(self._texts) < _MAX_TEXTS:
                self._texts[said] = text
        return text


def _global(ranks: tuple[int, ...], of_world: Any, of_group: Any) -> int | None:
    """A rank of the world from either way to say it."""
    if isinstance(of_world, int):
        return of_world
    return ranks[of_group] if isinstance(of_group, int) and 0 <= of_group < len(ranks) else None


def _first(value: Any) -> Any:
    """The tensor that stands for an argument; `None` without one."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return value if hasattr(value, "data_ptr") and hasattr(value, "dtype") else None


def _bytes(tensor: Any) -> int:
    """Bytes to hash; too many for what is not in this machine's memory."""
    if not hasattr(tensor, "data_ptr") or tensor.device.type != "cpu":
        return MAX_HASHED_BYTES + 1
    return int(tensor.numel()) * int(tensor.element_size())


def _caller(frame: FrameType | None) -> str:
    """The function outside torch, Proctor and the standard library's helpers that makes a call: `train.average`."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in _PASSED:
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            return f"{'__main__' if module == '__mp_main__' else module}.{name}"[:200]
        frame = frame.f_back
    return ""


def _site(frame: FrameType | None, libraries: tuple[str, ...]) -> str:
    """The user's line in which a thread stands: `file:line`, "" where there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*libraries, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
