"""Which operations of torch the program's own functions use, and in which order.

Rows of `Value.MANNER`, mode `uses`: of a few early calls of each function of the program, and of each model that trains, what each of the program's
functions on the stack used, in the order of the first use. `has` holds names of operations (`softmax`, `detach`) and, with `()`, of functions
of the program that it called. What layers and functions of torch do belongs to the function of the program that called them; what other libraries do, and what
torch's optimizers and helpers compute, is their own affair. Looked at in this way are
calls that a function mode of torch is on for; the mode hands each operation on as it is.

A mode changes two things in torch, and both are kept from happening: attention's inference kernels are not taken while one is on (so it is off while a model
that has them evaluates), and what `torch.compile` made would be compiled again (so nothing is looked at in a process that compiles). The first call of a function is not
looked at, nor is one that contained several updates: it may take long. Cost: 3 to 10 µs an operation of the calls that are looked at.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final

from proctor.instrument.observe.modules import class_name
from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.native import is_tap

LAST_STEP: Final = 64
_UPDATE: Final = "torch.optim.Optimizer.step"
_LOOKS: Final = 6  # of a function
_UPDATES: Final = 2  # in a call; one with more is not a part of a step
_NAMES: Final = 96  # of one function, in one look
_FUNCTIONS: Final = 64  # in one look
_FRAMES: Final = 80  # up from an operation
_OPERATIONS: Final = 20_000  # of one look
_HIDDEN: Final = ("torch.optim", "torch.nn.utils", "torch.distributed", "torch.utils", "torch.amp", "torch.cuda")  # whose own arithmetic goes by options and devices
_RUNS: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"})  # parts of the function that they stand in
# What only says how elements lie, or asks what a tensor is: written in one way or another, and without a meaning of its own.
_LAYOUT: Final = frozenset(
    """view reshape flatten unflatten contiguous expand expand_as view_as reshape_as size dim ndimension numel nelement stride storage_offset is_contiguous item tolist numpy cpu
    data_ptr element_size untyped_storage type is_floating_point is_complex get_device requires_grad_ retain_grad register_hook __get__ __set__ __len__ __iter__ __repr__ __format__
    __bool__ __int__ __float__ __index__ __contains__ __hash__ __deepcopy__ __reduce_ex__ __setstate__ backward to pin_memory cuda is_pinned is_same_size is_shared share_memory_""".split()
)


@register
class Operations(Probe):
    """What functions of the program use."""

    name = "operations"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._over = False
        self._calls: dict[str, list[int]] = {}  # of each function: calls, looks, and whether one had several updates
        self._updates = 0
        self._running: list[tuple[int, str, int]] = []  # call, function and updates before it, of each first call that runs
        self._look: _Look | None = None
        self._kept_off: list[int] = []  # calls of models whose kernels a mode would change
        self._stuck: _Look | None = None  # whose mode could not be taken off
        self._thread = threading.get_ident()

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _UPDATE:
            return self._updated, None
        if function == MODEL_CALL:
            return self._model_begins, self._model_ends
        if home is not Home.USER or function.rpartition(".")[2] == "__init__":
            return NO_HOOKS
        return (lambda args, kwargs: self._begins(function)), (lambda args, kwargs, result, raised: self._ends(raised))

    def step_begins(self, step: int) -> None:
        self._over = self._over or step > LAST_STEP

    def thinned(self) -> None:
        """The call that runs may end in a step without hooks."""
        self._over = True
        self._drop()

    def _drop(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            self._stuck = None if look.ends() else look

    def _updated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._updates += 1

    def _model_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._idle():
            return
        model, infers = args[0], True
        try:
            infers = _infers(model)
        finally:
            if infers:
                self._kept_off.append(self.sink.call)
                self._drop()
        if infers:
            return
        if model.training:
            self._begins(f"{MODEL_CALL} of {class_name(model)}")

    def _model_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._kept_off and self._kept_off[-1] >= self.sink.call:
            self._kept_off.pop()
        self._ends(raised)

    def _idle(self) -> bool:
        return (self._look is None and self._over) or threading.get_ident() != self._thread

    def _begins(self, function: str) -> None:
        if self._stuck is not None and self._thread == threading.get_ident() and self._stuck.ends():
            self._stuck = None
        if self._idle():
            return
        known = self._calls.setdefault(function, [0, 0, 0])
        known[0] += 1
        if self._look is not None or self._kept_off:
            return
        if known[0] == 1:
            self._running.append((self.sink.call, function, self._updates))
        elif known[1] < _LOOKS and not known[2] and not _compiles():
            known[1] += 1
            self._look = _Look(function, self.sink.call, self._updates)
            self._look.begins()

    def _ends(self, raised: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        call = self.sink.call
        while self._running and self._running[-1][0] >= call:
            _, function, updates = self._running.pop()
            self._calls[function][2] = int(self._updates - updates > _UPDATES)
        look = self._look
        if look is None or look.call < call:
            return
        self._drop()
        if look.error is not None:
            raise look.error
        if look.call == call and not raised and self._updates - look.updates <= _UPDATES and look.whole:
            for function, used in look.found.items():
                subject = look.function if function in ("", look.function) else f"{look.function} > {function}"
                self.sink.number(subject, float(len(used)), kind=Value.MANNER, facts={"mode": "uses", "has": "|".join(used), "lacks": ""})

    def closing(self) -> None:
        self._drop()


class _Look:
    """What one call uses."""

    def __init__(self, function: str, call: int, updates: int) -> None:
        self.function, self.call, self.updates = function, call, updates
        self.found: dict[str, dict[str, None]] = {}
        self.whole = True  # all of it was seen
        self.error: Exception | None = None
        self._left = _OPERATIONS
        self._end = _outside(sys._getframe())
        self._mode = _mode(self.used)
        self._on = False

    def begins(self) -> None:
        self._mode.__enter__()
        self._on = True

    def ends(self) -> bool:
        """Take the mode off; whether that is done. One that the program put above it, and left there, has the effects that ours has."""
        from torch.overrides import _get_current_function_mode

        self._left = 0
        if self._on and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._on = False
        return not self._on

    def used(self, name: str, frame: types.FrameType) -> None:
        """An operation, and the frame that asked for it. Runs in the program's call, so nothing comes out of it."""
        if self._left <= 0:
            self.whole = False
            return
        self._left -= 1
        try:
            self._place(_plain(name), frame)
        except Exception as e:  # noqa: BLE001 - told in the hook that ends the look
            self.error, self._left = e, 0

    def _place(self, name: str, frame: types.FrameType | None) -> None:
        inner = ""
        for _ in range(_FRAMES):
            if frame is None or frame is self._end:
                break
            code = frame.f_code
            whose = _whose(code, frame)
            if whose == "ours" or (whose in ("hidden", "library") and not inner):
                return
            if whose == "user" and code.co_name not in _RUNS:
                self._note(_called(code, frame), f"{inner}()" if inner else name)
                inner = code.co_name
            frame = frame.f_back
        if not inner:
            self._note("", name)

    def _note(self, function: str, name: str) -> None:
        used = self.found.get(function)
        if used is None:
            if len(self.found) >= _FUNCTIONS:
                self.whole = False
                return
            used = self.found[function] = {}
        if len(used) < _NAMES:
            used[name] = None
        else:
            self.whole = self.whole and name in used


def _mode(used: Callable[[str, types.FrameType], None]) -> Any:
    """A mode that tells of each operation of torch, by its name, and hands it on."""
    if not _MODES:
        from torch.overrides import TorchFunctionMode

        class Watching(TorchFunctionMode):  # type: ignore[misc]
            def __init__(self, tell: Callable[[str, types.FrameType], None]) -> None:
                super().__init__()
                self.tell = tell

            def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
                frame = sys._getframe(1)
                name = getattr(func, "__name__", "")
                if name not in _LAYOUT and type(name) is str and (not name.startswith("_") or name.startswith("__")):
                    self.tell(name, frame)
                return _original(func, name, frame)(*args, **(kwargs or {}))

        _MODES.append(Watching)
    return _MODES[0](used)


def _original(func: Any, name: str, frame: types.FrameType) -> Any:
    """What torch would go on with if no mode were on.

    Torch asks for functions again by their names, so a mode is handed what stands there: a tap of ours, or a wrapper of the program's, that this call has gone through already.
    """
    if type(func) is not types.FunctionType and not is_tap(func):
        return func
    import torch

    if frame.f_code is not torch.overrides.handle_torch_function.__code__ or frame.f_back is None:  # C++ asks
        return next((found for home in (torch._C.TensorBase, torch._C._VariableFunctions) if (found := getattr(home, name, None)) is not None), func)
    body = frame.f_back.f_code
    code = getattr(func, "__code__", None)
    if code is body and not is_tap(func):
        return func
    if code is not None and code is not body and not is_tap(func) and code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return func  # torch's own way: one function that stands for several
    if body not in _BODIES:
        _BODIES[body] = next((f for f in gc.get_referrers(body) if type(f) is types.FunctionType and f.__code__ is body), func)
    return _BODIES[body]


_MODES: list[Any] = []
_BODIES: dict[types.CodeType, Any] = {}
_KNOWN: dict[types.CodeType, str] = {}
_PREFIXES: list[tuple[str, ...]] = []


def _whose(code: types.CodeType, frame: types.FrameType) -> str:
    known = _KNOWN.get(code)
    if known is None:
        if not _PREFIXES:
            _PREFIXES.append(library_prefixes())
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == "proctor":
            known = "ours"
        else:
            theirs = not code.co_filename.startswith("<") and os.path.abspath(code.co_filename).startswith(_PREFIXES[0])
            hidden = theirs and f"{module}.".startswith(tuple(f"{name}." for name in _HIDDEN))
            known = "hidden" if hidden else "torch" if module.partition(".")[0] == "torch" else "library" if theirs or code.co_filename.startswith("<") else "user"
        if len(_KNOWN) > 4096:
            _KNOWN.clear()
        _KNOWN[code] = known
    return known


def _called(code: types.CodeType, frame: types.FrameType) -> str:
    module = str(frame.f_globals.get("__name__", ""))
    return f"{'__main__' if module == '__mp_main__' else module}.{code.co_qualname.rpartition('<locals>.')[2]}"


def _outside(frame: types.FrameType | None) -> types.FrameType | None:
    """The nearest frame that is not ours."""
    while frame is not None and _whose(frame.f_code, frame) == "ours":
        frame = frame.f_back
    return frame


def _plain(name: str) -> str:
    """`add` for `__iadd__` and `__radd__`: an operator is written in one way or another."""
    found = re.fullmatch(r"__[ir]?(add|sub|mul|div|truediv|matmul|pow|mod|floordiv|and|or|xor)__", name)
    return {"truediv": "div"}.get(found[1], found[1]) if found else name


def _infers(model: Any) -> bool:
    """Whether a call of this model may take kernels of attention that torch keeps for inference."""
    import torch

    kinds = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
    return any(isinstance(m, kinds) and not (m.training and torch.is_grad_enabled()) for m in model.modules())


def _compiles() -> bool:
    """Whether anything in this process was given to `torch.compile`; also where torch does not tell."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return not isinstance(backends, dict) or any(backend is not None for backend in backends.values())
