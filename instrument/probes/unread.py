"""Whether a mask that comes with a batch is read by nothing, whether what is computed for a loss is, and whether two parts of a batch are one.

A row of `Value.KEPT`, `unread`, once for a name: zeros and ones, both, that a function of the program is given as an argument, or takes out of a batch of four parts at least into a variable of its own, where no line
of the function reads that argument or variable. So are ends of episodes that a target leaves out, weights of places that are padded, and a mask of attention that is handed on no further. What a name with `_` in front is
given is left out on purpose; what is deleted, or read by a function within, is read. Labels are no masks: whole numbers count where they begin with ones and go on with zeros beside others of the same shape, as padding does, and rows
with one 1 each do not. Of a function that reads none of its arguments, or leaves out several, nothing is said: it is handed the whole batch and takes some of it; nor of parts that are all ones, or all zeros.
`unused`, once for a name: a function of the program computes something that depends on parameters, gives it a name of its own, and none of its lines reads that: a single number, as a term of a loss is; what another name is made like (of other masks, of
the other half of a batch) which is read; a list that results are put into; or an order, of numbers from 0 on that each come once and not one behind the other. What several names are unpacked from, and a second name of something, are none. `twice`, once: of a batch of four parts at least, two of floating point have the same numbers
in different memory, in each of eight rows at least of which not all are alike, in three steps in a row, and some function reads a variable of each name: a state that is its next one. `order`, once for a name: a function puts one of its arguments into the order of a sort (`a = a[order]`, for packing), and not another one of as many rows, which it
reads behind: samples meet parts of others. Where the order is used for anything but to index and to be returned, results may be put back, and nothing is said.
Looked at are functions that run when a model is called or an update begins, and those that are observed when they are called. Cost: a walk up the frames at these calls, in the first steps, and values of what is not read.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from proctor.instrument.observe.content import unseen
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._looks import whose
from proctor.instrument.probes._reordered import Reordered, reordered
from proctor.instrument.probes._wasted import Wasted, arguments_of, wasted
from proctor.instrument.probes.source import reading
from proctor.instrument.probes.source.results import function_named
from proctor.invariants.schema import MODEL_CALL, Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_CALLS: Final = 12  # of a function
_PLACES: Final = 4  # looks at one place of a function that runs
_LOOKS: Final = 96  # at one that runs
_ROWS: Final = 8  # of two parts that are one
_AGAIN: Final = 3
_PART: Final = 1 << 24  # elements of a part of a batch
_LAST: Final = 32  # step
_PARTS: Final = 4  # of a batch
_LARGEST: Final = 1 << 16  # elements of a mask
_LEAST: Final = 4
_FRAMES: Final = 40
_WALKS: Final = 512  # up from torch's functions
_CODES: Final = 4096
_Names = list[tuple[str, list[str]]]  # a variable, and what came with it


class _Code(NamedTuple):
    """What is to be looked at while a function runs."""

    unread: _Names
    unused: list[Wasted]
    parts: list[list[str]]  # names of what is unpacked together
    orders: list[Reordered]


_NONE: Final = _Code([], [], [], [])


@register
class Unread(Probe):
    """Masks without a reader."""

    name = "unread"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._codes: dict[types.CodeType, _Code] = {}
        self._functions: dict[str, tuple[tuple[str, ...], _Names]] = {}  # of each: its arguments, and those that it does not read
        self._looks: dict[types.CodeType | str | tuple[types.CodeType, int], int] = {}
        self._step = 0
        self._reads: set[str] = set()  # names that functions of the program read which have run so far
        self._alike: dict[tuple[str, str], tuple[int, int]] = {}  # parts of batches: in how many steps in a row they were one, and the last of them
        self._told: set[str] = set()
        self._walks = 0

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._model, None
        if function == _UPDATE:
            return self._called, None
        if function.startswith("torch.nn.functional."):
            return self._within, None
        if home is not Home.USER or function.endswith(".__init__"):
            return NO_HOOKS
        return (lambda args, kwargs: self._given(function, args, kwargs)), None

    def step_begins(self, step: int) -> None:
        self._step, self.over = step, self.over or step >= _LAST

    def thinned(self) -> None:
        self.over = True

    def _model(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self.over:
            made = inspect.getattr_static(type(args[0]), "forward", None)
            if isinstance(made := inspect.unwrap(made) if callable(made) else None, types.FunctionType) and whose(made.__code__, made.__globals__) == "user":
                self._given(f"{made.__module__}.{made.__qualname__}", args, kwargs, made)
            self._called(args, kwargs)

    def _within(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Forwards of the parts of a model run around torch's functions. Where experience is collected first, without gradients, nothing is trained yet."""
        import torch

        if self._walks < _WALKS and torch.is_grad_enabled():
            self._walks += 1
            self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Functions of the program that run now."""
        frame: types.FrameType | None = None if self.over else sys._getframe()
        for _ in range(_FRAMES):
            if frame is None:
                return
            code = frame.f_code
            known = self._codes.get(code)
            if known is None:
                read = _read(code) if whose(code, frame.f_globals) == "user" and len(self._codes) < _CODES else None
                self._reads |= read or set()
                known = self._codes[code] = _NONE if read is None else _of(code, read)
            if known is not _NONE and self._wants((code, frame.f_lasti), _PLACES) and self._wants(code, _LOOKS):
                scope = reading.scope_of(frame)
                try:
                    function = f"{frame.f_globals.get('__name__', '')}.{code.co_qualname}".removesuffix(".<module>")
                    with unseen():
                        self._tell(function, _passed(known.unread, frame), scope)
                        self._waste(function, known.unused, scope)
                        self._same(function, known.parts, scope)
                        self._mixed(function, known.orders, scope)
                finally:
                    reading.release(frame, scope)
            frame = frame.f_back

    def _given(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, made: types.FunctionType | None = None) -> None:
        if self.over or self._functions.get(function) == _NOTHING:
            return
        if function not in self._functions:
            made = made or (function_named(function) if len(self._functions) < _CODES else None)
            arguments = () if made is None else arguments_of(made.__code__)
            read = None if made is None else _read(made.__code__)
            names: _Names = [] if made is None or read is None else [(name, others) for name, others in _unread(made.__code__, read, []) if name in arguments]
            self._functions[function] = (arguments, names) if names else _NOTHING
        arguments, names = self._functions[function]
        if names and kwargs and any(name in kwargs for name, _ in names) and _spread(sys._getframe(1)):
            return  # `model(**batch)`: a part of a batch that it has no use for
        if names and self._wants(function, _CALLS):
            self._tell(function, names, dict(zip(arguments, args)) | (kwargs or {}))

    def _wants(self, of: types.CodeType | str | tuple[types.CodeType, int], most: int) -> bool:
        self._looks[of] = self._looks.get(of, 0) + 1
        return self._looks[of] <= most

    def _waste(self, function: str, names: list[Wasted], scope: Mapping[str, Any]) -> None:
        for name, listed, twin, written in names:
            value: Any = scope.get(name)
            if name in self._told or value is None:
                continue
            if (many := _order(value)) and not listed:
                self._told.add(name)
                self.sink.number(name, float(many), kind=Value.KEPT, facts={"what": "unused", "seen": f"no line of {function} reads {name}, an order of {many} things"})
                continue
            if written:
                continue
            if listed:
                what = "a list of results that depend" if type(value) is list and len(value) > 1 and all(_depends(one) for one in value) else ""
            else:
                what = "" if not _depends(value) else "a single number that depends" if value.dim() == 0 else "which depends" if twin else ""
            if what:
                self._told.add(name)
                beside = f", while {twin}, which is made in the same way, is read" if twin else ""
                seen = f"no line of {function} reads {name}, {what} on parameters{beside}"
                self.sink.number(name, 1.0, kind=Value.KEPT, facts={"what": "unused", "seen": seen})

    def _same(self, function: str, groups: list[list[str]], scope: Mapping[str, Any]) -> None:
        """Say of two parts that were unpacked together that they are one."""
        for group in groups:
            parts = [(name, value) for name in group if name in self._reads and _rows(value := scope.get(name))]
            for i, (first, one) in enumerate(parts):
                for second, other in parts[i + 1 :]:
                    times, last = self._alike.get((first, second), (0, -1))
                    times = times + (last != self._step) if _one(one, other) else 0
                    self._alike[first, second] = times, self._step
                    if times == _AGAIN and f"{first}, {second}" not in self._told:
                        self._told.add(f"{first}, {second}")
                        seen = f"{second} holds what {first} holds, number by number, in {function}, which takes both out of one batch"
                        self.sink.number(second, float(times), kind=Value.KEPT, facts={"what": "twice", "seen": seen})

    def _mixed(self, function: str, pairs: list[Reordered], scope: Mapping[str, Any]) -> None:
        """Say of an argument that it is not in the order of the others."""
        for moved, order, left in pairs:
            many = 0 if left in self._told else _order(scope.get(order))
            if many and all(_of_samples(scope.get(name), many) for name in (moved, left)):
                self._told.add(left)
                seen = f"{function} puts {moved} into the order of {order}, and not {left}, which has as many rows ({many}) and is read behind: samples meet parts of others"
                self.sink.number(left, float(many), kind=Value.KEPT, facts={"what": "order", "seen": seen})

    def _tell(self, function: str, names: _Names, scope: Mapping[str, Any]) -> None:
        for name, others in names:
            value: Any = scope.get(name)
            if name in self._told or not _is_mask(value, [scope.get(other) for other in others]):
                continue
            self._told.add(name)
            seen = f"no line of {function} reads {name}, which holds ones and zeros, both, as ends of episodes or places of padding do"
            self.sink.number(name, float(value.sum()), kind=Value.KEPT, facts={"what": "unread", "seen": seen})


_NOTHING: Final[tuple[tuple[str, ...], _Names]] = ((), [])


def _passed(names: _Names, frame: types.FrameType) -> _Names:
    """Without arguments of this function, if it is called with a star."""
    arguments = arguments_of(frame.f_code)
    given = [name for name, _ in names if name in arguments]
    return [one for one in names if one[0] not in given] if given and _spread(frame.f_back) else names


def _spread(frame: types.FrameType | None) -> bool:
    """Whether the program's call that led to this frame is one with a star: whoever wrote it handed on what there was."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("proctor", "torch"):
        frame = frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "CALL_FUNCTION_EX"


def _of(code: types.CodeType, read: set[str]) -> _Code:
    """What is to be looked at while this function runs, which reads these names."""
    groups = _unpacked(code)
    found = _Code(_unread(code, read, groups), wasted(code, read), groups, reordered(code))
    return found if any(found) else _NONE


def _unread(code: types.CodeType, read: set[str], groups: list[list[str]]) -> _Names:
    """Arguments of a function, and variables that it takes out of a sequence of parts, that none of its lines reads."""
    arguments = arguments_of(code)
    others = arguments[1:] if arguments[:1] == ("self",) else arguments
    found: _Names = _alone(others, read, list(arguments)) if read & set(others) else []  # one that reads nothing is an interface
    return found + [one for names in groups for one in _alone(names, read, names)]


def _unpacked(code: types.CodeType) -> list[list[str]]:
    """Variables that are taken out of one sequence of parts."""
    steps = list(dis.get_instructions(code))
    found = [(one.arg, _stored(steps, at)) for at, one in enumerate(steps) if one.opname == "UNPACK_SEQUENCE" and (one.arg or 0) >= _PARTS]
    return [names for size, names in found if len(names) == size]


def _alone(names: Sequence[str], read: set[str], beside: list[str]) -> _Names:
    """The one of these names that is not read. Who leaves several unread is handed more than is asked for (the whole batch, by a star)."""
    left = [name for name in names if name not in read and not name.startswith("_")]
    return [(left[0], beside)] if len(left) == 1 and names.count(left[0]) == 1 else []


def _stored(steps: list[dis.Instruction], at: int) -> list[str]:
    """Variables that are taken from a sequence by the instruction `at`."""
    names: list[str] = []
    for one in steps[at + 1 :]:
        if one.opname not in ("STORE_FAST", "STORE_NAME", "STORE_FAST_STORE_FAST") or len(names) >= (steps[at].arg or 0):
            break
        names += one.argval if isinstance(one.argval, tuple) else [str(one.argval)]
    return names


def _read(code: types.CodeType) -> set[str] | None:
    """Names that a function, or one within it, reads or deletes; `None` where it asks for all of them."""
    found: set[str] = set(code.co_cellvars)
    for one in _instructions(code):
        if one.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF", "DELETE_", "STORE_FAST_LOAD")):
            found.update(one.argval if isinstance(one.argval, tuple) else (str(one.argval),))
    return None if found & {"locals", "vars", "globals", "eval", "exec"} else found


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _is_mask(value: Any, beside: list[Any]) -> bool:
    """Zeros and ones, both, that are no labels."""
    if not _dense(value) or not _LEAST <= _size(value) <= _LARGEST:
        return False
    with unseen():
        kind, shape = _kind(value), tuple(value.shape)
        if kind == "?" or len(shape) > 3 or (kind == "i" and (len(shape) != 2 or shape[1] < 2)):
            return False
        numbers = [float(x) for x in value.reshape(-1).tolist()]
        if set(numbers) != {0.0, 1.0}:
            return False
        rows = [numbers[i : i + shape[-1]] for i in range(0, len(numbers), shape[-1])] if len(shape) > 1 and shape[-1] > 1 else []
        if kind == "i":  # ones, then zeros, beside whole numbers of the same shape
            return all(row == sorted(row, reverse=True) for row in rows) and any(_whole(other, shape) for other in beside if other is not value)
        return not rows or any(sum(row) != 1 for row in rows)


def _whole(other: Any, shape: tuple[int, ...]) -> bool:
    return _dense(other) and _kind(other) == "i" and tuple(other.shape) == shape and bool((other > 1).any())


def _order(value: Any) -> int:
    """How many things this is an order of, that is not the one in which they lie; 0: it is none."""
    if type(value) is list:
        numbers = value if _LEAST <= len(value) <= _LARGEST and all(type(n) is int for n in value) else []
    elif _dense(value) and _kind(value) == "i" and len(value.shape) == 1 and _LEAST <= _size(value) <= _LARGEST:
        with unseen():
            numbers = value.tolist()
    else:
        numbers = []
    return len(numbers) if numbers and numbers != (through := list(range(len(numbers)))) and sorted(numbers) == through else 0


def _of_samples(value: Any, many: int) -> bool:
    """Whether these are so many rows of numbers, not all alike."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dim() < 2 or value.shape[0] != many or value.device.type != "cpu":
        return False
    return not bool((value.detach() == value.detach()[:1]).all())


def _depends(value: Any) -> bool:
    """Whether this is computed of parameters."""
    import torch

    return type(value) is torch.Tensor and value.requires_grad and not value.is_leaf


def _rows(value: Any) -> bool:
    """Whether these are rows of numbers of floating point."""
    return _dense(value) and _kind(value) == "f" and len(value.shape) > 1 and value.shape[0] >= _ROWS and _size(value) <= _PART


def _one(one: Any, other: Any) -> bool:
    """Whether two parts hold the same numbers, not in the same memory, and not the same in all rows."""
    if one is other or tuple(one.shape) != tuple(other.shape) or type(one) is not type(other) or one.dtype != other.dtype or _address(one) == _address(other):
        return False
    with unseen():
        return bool((one[0] == other[0]).all()) and bool((one == other).all()) and not bool((one == one[:1]).all())


def _address(value: Any) -> int:
    return int(value.data_ptr()) if hasattr(value, "data_ptr") else int(value.ctypes.data)


def _dense(value: Any) -> bool:
    import numpy as np
    import torch

    if type(value) is torch.Tensor:
        return value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
    return type(value) is np.ndarray


def _size(value: Any) -> int:
    return int(value.numel()) if hasattr(value, "numel") else int(value.size)


def _kind(value: Any) -> str:
    """b: truth values, f: floating point, i: whole numbers."""
    text = str(value.dtype).removeprefix("torch.")
    return "b" if text.startswith("bool") else "f" if text.startswith(("float", "bfloat")) else "i" if text.startswith(("int", "uint")) else "?"
