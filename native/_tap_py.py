"""Python twin of the call tap: same classes, same results, slower. Fallback where the extension is missing, and oracle.

`describe.h`, `recorder.h` and `tap.h` say what the parts do; this file says it again without C. Where a rule reads
oddly (`list.__len__(x)` and not `len(x)`), it is because describing an argument must never run the user's code.
torch.compile traces into a frame of this twin (the extension has none): graph breaks where it taps compiled code.
"""

# ruff: noqa: BLE001  (whatever goes wrong in here, nothing of it may reach the user's call)

from __future__ import annotations

import _thread
import json
import math
import operator
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

_MAX_TEXT = 64
_MAX_FUNCTION_TEXT = 200
_MAX_SEQUENCE = 8
_MAX_MAPPING = 16
_MAX_ATTRIBUTES = 12
_MAX_ARGUMENTS = 64
_MAX_DEPTH = 3
_MAX_LEAVES = 256
_MAX_FRAMES = 24
_MAX_CONTEXTS = 1 << 12
_NO_SCALARS_ABOVE, _NO_DIMS_ABOVE, _NOTHING_ABOVE = 128, 1024, 4096
_RAISED, _ROOT, _THREAD = 1, 2, 4
_ROOTS_ONLY = 1 << 31  # in a module code: wanted as the outermost module only
_SIGNATURE, _SITE = 2, 1
_COLUMNS = (
    ("seq", np.uint32), ("parent", np.uint32), ("fn", np.uint32), ("site", np.uint32), ("ctx", np.uint32),
    ("args", np.uint32), ("ret", np.uint32), ("t", np.int64), ("dur", np.int64), ("flags", np.uint8),
)  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_TORCH_CONSTANTS = frozenset({"torch.dtype", "torch.device", "torch.layout", "torch.memory_format", "torch.qscheme"})

_get = object.__getattribute__
_type_dict = type.__dict__["__dict__"].__get__
_type_module = type.__dict__["__module__"].__get__
_type_qualname = type.__dict__["__qualname__"].__get__
_type_name = type.__dict__["__name__"].__get__
_type_mro = type.__dict__["__mro__"].__get__


# -- describing --------------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


def _quote(text: str, limit: int | None = None) -> str:
    # `str.__getitem__`: a subclass may have its own.
    return json.dumps(_clean(str.__getitem__(text, slice(0, limit))), ensure_ascii=False)


def _joined(module: object, name: str) -> str:
    return f"{module}.{name}" if type(module) is str and module not in ("", "builtins") else name


def type_text(cls: type) -> str:
    """module.qualname of a type, without asking its metaclass; a builtin has no module in its name."""
    return _joined(_type_module(cls), str(_type_qualname(cls)))


def _module_class(cls: type) -> str:
    module = _type_module(cls)
    if type(module) is str and module.startswith("torch.nn.modules."):
        return f"torch.nn.{_type_name(cls)}"
    return type_text(cls)


def _instance_dict(value: object) -> dict[Any, Any]:
    """The instance's own attributes, past any `__getattr__` or `__dict__` property."""
    for cls in _type_mro(type(value)):
        found = _type_dict(cls).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            attributes = found.__get__(value)
            return attributes if isinstance(attributes, dict) else {}
    return {}


class _Describer:
    """Types and names that are known by sight."""

    def __init__(self) -> None:
        self.tensor: type | None = None
        self.parameter: type | None = None
        self.module: type | None = None
        self.depth: Callable[[], int] | None = None
        self.disable: Callable[[], Any] | None = None
        self.tracked: dict[int, str] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], detail: int) -> str:
        with _Encoder(self, detail) as encoder:
            positional = ",".join([encoder.value(a, 0) for a in args[:_MAX_ARGUMENTS]])
            named = ",".join(
                [f"{_quote(k, _MAX_TEXT)}:{encoder.value(v, 0)}" for k, v in list(kwargs.items())[:_MAX_ARGUMENTS]]
            )
        return f'{{"a":[{positional}],"k":{{{named}}}}}'

    def value(self, value: object, detail: int) -> str:
        with _Encoder(self, detail) as encoder:
            return encoder.value(value, 0)


class _Encoder:
    """Writes one signature."""

    def __init__(self, describer: _Describer, detail: int) -> None:
        self._d = describer
        self._scalars = detail < 1
        self._with_dims = detail < 2
        self._leaves = 0
        self._mode_checked = False
        self._guard: Any = None

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._guard is not None:
            try:
                self._guard.__exit__(None, None, None)
            except BaseException as error:
                _swallow(error)

    def value(self, value: Any, depth: int) -> str:
        self._leaves += 1
        if self._leaves > _MAX_LEAVES:
            return '{"e":"cut"}'
        try:
            return self._value(value, depth)
        except BaseException as error:
            _swallow(error)
            return '{"e":"error"}'

    def _value(self, value: Any, depth: int) -> str:
        if value is None:
            return "null"
        if value is True or value is False:
            return "true" if value else "false"
        cls = type(value)
        mro = _type_mro(cls)
        if self._d.tensor is not None and cls is self._d.tensor:
            return self._tensor(value, "", exact=True)
        if self._d.parameter is not None and cls is self._d.parameter:
            return self._tensor(value, "Parameter", exact=True)
        if cls is int:
            return self._integer(value)
        if cls in (Tap, MethodTap):
            return self._function(value, 0)
        if self._d.tensor in mro:
            return self._tensor(value, _type_name(cls), exact=False)
        if self._d.module in mro:
            return self._module(value)
        for sequence in (list, tuple):
            if sequence in mro:
                return self._sequence(value, sequence, depth)
        if dict in mro:
            return self._mapping(value, depth)
        for base in (set, frozenset):
            if base in mro:
                return self._set(value, base, depth)
        if str in mro:
            return _quote(value, _MAX_TEXT) if self._scalars else '{"e":"str"}'
        if type in mro:
            return self._text(type_text(value))
        if float in mro:
            return self._real(value)
        return self._other(value, cls, mro)

    def _other(self, value: Any, cls: type, mro: tuple[type, ...]) -> str:
        if cls in (types.FunctionType, types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType) or (
            types.BuiltinFunctionType in mro
        ):
            return self._function(value, 0)
        text = type_text(cls)
        if text in _TORCH_CONSTANTS:
            return f'{{"y":{_quote(str(value), _MAX_TEXT)}}}'
        if text == "numpy.ndarray":
            return f'{{"T":{_quote("numpy." + value.dtype.name[:_MAX_TEXT])},"s":{self._dims(value.shape)}}}'
        entries = _type_dict(cls).get("__entries")  # a pybind11 enum such as torch.distributed.ReduceOp
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if type(entry) is tuple and entry and entry[0] is value:
                return f'{{"y":{_quote(f"{text}.{name}")}}}'
        return self._object(value)

    def _integer(self, value: int) -> str:
        return str(value) if self._scalars and -(1 << 63) <= value < 1 << 64 else '{"e":"int"}'

    def _real(self, value: float) -> str:
        if not self._scalars:
            return '{"e":"float"}'
        number = float.__float__(value)
        return float.__repr__(number) if math.isfinite(number) else f'"{float.__repr__(number)}"'

    def _sequence(self, value: Any, base: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return f'{{"e":"{base.__name__}"}}'
        n = base.__len__(value)
        items = [self.value(base.__getitem__(value, i), depth + 1) for i in range(min(n, _MAX_SEQUENCE))]
        return f'{{"L":[{",".join(items)}],"n":{n}}}'

    def _set(self, value: Any, base: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return '{"e":"set"}'
        n = base.__len__(value)
        items = list(base.__iter__(value)) if n <= 64 else []
        kinds = {type(i) for i in items}
        items = sorted(items) if kinds in ({str}, {int}) else []
        texts = [self.value(i, depth + 1) for i in items[:_MAX_SEQUENCE]]
        return f'{{"L":[{",".join(texts)}],"n":{n}}}'

    def _mapping(self, value: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return '{"e":"dict"}'
        items = [(k, v) for k, v in dict.items(value) if type(k) is str][:_MAX_MAPPING]
        texts = [f"{_quote(k, _MAX_TEXT)}:{self.value(v, depth + 1)}" for k, v in items]
        return f'{{"D":{{{",".join(texts)}}},"n":{dict.__len__(value)}}}'

    @staticmethod
    def _text(text: str) -> str:
        cut = _clean(text).encode()[:_MAX_FUNCTION_TEXT].decode(errors="ignore")
        return f'{{"f":{_quote(cut)}}}'

    def _function(self, value: Any, hops: int) -> str:
        cls = type(value)
        if cls is types.FunctionType:
            return self._text(_joined(value.__module__, value.__qualname__))
        if types.BuiltinFunctionType in _type_mro(cls):
            return self._text(_joined(value.__module__, value.__name__))
        if cls in (types.MethodDescriptorType, types.WrapperDescriptorType):
            return self._text(f"{type_text(value.__objclass__)}.{value.__name__}")
        if cls in (types.MethodType, Tap, MethodTap) and hops <= 8:
            inner = value.__func__ if cls is types.MethodType else _get(value, "tapped")
            return self._function(inner, hops + 1) if hops < 8 else self._object(inner)
        if type in _type_mro(cls):
            return self._text(type_text(value))
        return self._object(value)

    def _object(self, value: Any) -> str:
        pairs: list[str] = []
        for key, item in _instance_dict(value).items():
            if len(pairs) >= _MAX_ATTRIBUTES:
                break
            if type(key) is not str or len(key) > _MAX_TEXT:
                continue
            if type(item) is str and self._scalars and len(item) <= _MAX_TEXT:
                pairs.append(f"{_quote(key)}:{_quote(item)}")
            elif item is None or type(item) is bool:
                pairs.append(f"{_quote(key)}:{json.dumps(item)}")
        name = self._d.tracked.get(id(value))
        tracked = f',"v":{_quote(name)}' if name else ""
        return f'{{"O":{_quote(type_text(type(value)))}{tracked},"a":{{{",".join(pairs)}}}}}'

    def _module(self, value: Any) -> str:
        out = f'{{"M":{_quote(_module_class(type(value)))}'
        if path := self._d.tracked.get(id(value)):
            out += f',"p":{_quote(path)}'
        training = _instance_dict(value).get("training")
        if training is True or training is False:
            out += f',"t":{int(training)}'
        return out + "}"

    def _dims(self, shape: Any) -> str:
        if not self._with_dims or tuple not in _type_mro(type(shape)):
            return "null"
        dims = [tuple.__getitem__(shape, i) for i in range(tuple.__len__(shape))]
        return f"[{','.join([str(d) if type(d) is int else '-1' for d in dims])}]"

    def _read(self, tensor: Any, name: str) -> Any:
        """A C getter of the tensor type, past overrides of subclasses; None where it fails."""
        try:
            for cls in _type_mro(self._d.tensor):
                found = _type_dict(cls).get(name)
                if found is not None:
                    break
            return found.__get__(tensor) if type(found) is types.GetSetDescriptorType else getattr(tensor, name)
        except BaseException as error:
            _swallow(error)
            return None

    def _tensor(self, value: Any, name: str, *, exact: bool) -> str:
        self._quiet(exact)
        dtype = self._read(value, "dtype")
        text = "unknown" if dtype is None else str(dtype).removeprefix("torch.")
        device = "cpu" if self._read(value, "is_cpu") is True else "cuda" if self._read(value, "is_cuda") is True else None
        if device is None:
            device = getattr(self._read(value, "device"), "type", "")
        out = f'{{"T":{_quote(text)},"s":{self._dims(self._read(value, "shape"))},"d":{_quote(device, _MAX_TEXT)}'
        if self._read(value, "requires_grad") is True:
            out += ',"g":1'
        if name:
            out += f',"c":{_quote(name)}'
        if tracked := self._d.tracked.get(id(value)):
            out += f',"v":{_quote(tracked)}'
        return out + "}"

    def _quiet(self, exact: bool) -> None:
        """Switch `__torch_function__` off for the rest of this signature, once, where a getter would call it."""
        if self._guard is not None or self._d.disable is None:
            return
        try:
            if exact:
                if self._mode_checked or self._d.depth is None:
                    return
                self._mode_checked = True
                if self._d.depth() <= 0:
                    return
            guard = self._d.disable()
            guard.__enter__()
            self._guard = guard
        except BaseException as error:
            _swallow(error)


# -- recording ---------------------------------------------------------------------------------------------


class _Local(threading.local):
    inside = 0  # > 0: our own code runs, taps pass through


_local = _Local()


class _Inside:
    def __enter__(self) -> None:
        _local.inside += 1

    def __exit__(self, *exc: object) -> None:
        _local.inside -= 1


def _swallow(error: BaseException) -> bool:
    """Ctrl-C that lands in our own code belongs to the user: arm it again. True if it was that."""
    if isinstance(error, KeyboardInterrupt):
        _thread.interrupt_main()
        return True
    return False


class _Span:
    __slots__ = ("args", "ctx", "flags", "fn", "module", "outer", "parent", "seq", "site", "synthetic", "t")

    seq: int
    parent: int
    fn: int
    site: int
    ctx: int
    args: int
    t: int
    flags: int
    outer: str
    module: bool
    synthetic: bool


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Span] = []
        self.modules = 0


class Recorder:
    """Rows of calls, names and contexts of this process. Created disabled."""

    def __init__(self) -> None:
        self.enabled = False
        self.ctx = 0
        self.capacity = 4_000_000
        self.dropped = 0
        self.current_seq = 0
        self.on_error: Callable[[BaseException], object] | None = None
        self.module_namer: Callable[[type], int] | None = None
        self._describer = _Describer()
        self._rows: list[tuple[int, ...]] = []
        self._names: list[dict[str, int]] = [{} for _ in range(6)]
        self._fresh: list[tuple[int, int, str]] = []
        self._resolver: Callable[[int, bool, str, str], int] | None = None
        self._is_grad: Callable[[], bool] | None = None
        self._is_autocast: Callable[[str], bool] | None = None
        self._autocast_dtype: Callable[[str], Any] | None = None
        self._any_autocast: Callable[[], bool] | None = None
        self._devices: list[str] = []
        self._prefixes: tuple[str, ...] = ()
        self._contexts: dict[tuple[int, bool, str, str], int] = {}
        self._module_codes: dict[type, int] = {}
        self._thread = _ThreadState()
        self._main = threading.get_ident()

    # -- set up

    def set_context_resolver(self, resolver: Callable[[int, bool, str, str], int] | None) -> None:
        self._resolver = resolver

    def set_probes(
        self,
        is_grad_enabled: Callable[[], bool] | None,
        is_autocast_enabled: Callable[[str], bool] | None,
        get_autocast_dtype: Callable[[str], Any] | None,
        device_types: tuple[str, ...],
        is_any_autocast_enabled: Callable[[], bool] | None = None,
    ) -> None:
        self._is_grad = is_grad_enabled
        self._is_autocast = is_autocast_enabled
        self._autocast_dtype = get_autocast_dtype
        self._any_autocast = is_any_autocast_enabled
        known = is_autocast_enabled is not None and get_autocast_dtype is not None
        self._devices = list(device_types) if known else []

    def set_tensor_types(self, tensor_type: type, parameter_type: type | None = None) -> None:
        self._describer.tensor, self._describer.parameter = tensor_type, parameter_type

    def set_module_type(self, module_type: type) -> None:
        self._describer.module = module_type

    def set_torch_function_guard(self, depth: Callable[[], int] | None, disable: Callable[[], Any] | None) -> None:
        self._describer.depth, self._describer.disable = depth, disable

    def set_library_prefixes(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = tuple(prefixes)

    def set_tracked_names(self, names: dict[int, str]) -> None:
        self._describer.tracked = {i: _clean(n) for i, n in names.items()}

    def track(self, id: int, name: str) -> None:
        self._describer.tracked[id] = _clean(name)

    def untrack(self, id: int) -> None:
        self._describer.tracked.pop(id, None)

    # -- reading

    @property
    def pending(self) -> int:
        return len(self._rows)

    @property
    def current_call(self) -> int:
        stack = self._thread.stack
        return stack[-1].seq if stack else 0

    def open_spans(self) -> list[tuple[int, int, int]]:
        return [(s.seq, s.fn, s.t) for s in self._thread.stack]

    def intern(self, kind: int, text: str) -> int:
        if not 0 <= kind < 6:
            raise ValueError(f"kind is {kind}, expected 0 to 5")
        names, text = self._names[kind], _clean(text)
        if (code := names.get(text)) is None:
            code = names[text] = len(names) + 1
            self._fresh.append((kind, code, text))
        return code

    def drain_names(self) -> list[tuple[int, int, str]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def drain(self) -> dict[str, np.ndarray[Any, Any]]:
        rows, self._rows = self._rows, []
        return {name: np.array([r[i] for r in rows], dtype=dtype) for i, (name, dtype) in enumerate(_COLUMNS)}

    # -- synthetic rows

    def begin(self, fn: int, args_sig: int = 0) -> int:
        if not self.enabled:
            return 0
        with _Inside():
            span = self._open(fn, module=False, synthetic=True)
        span.args, span.t = args_sig, time.monotonic_ns()
        return span.seq

    def end(self, seq: int, ret_sig: int = 0, raised: bool = False) -> None:
        if seq:
            self._close(seq, ret_sig, raised, time.monotonic_ns())

    def record_call(self, fn: int, args_sig: int, ret_sig: int, dur_ns: int = 0) -> int:
        if not self.enabled:
            return 0
        with _Inside():
            span = self._open(fn, module=False, synthetic=True)
        now = time.monotonic_ns()
        span.args, span.t = args_sig, now - dur_ns
        self._close(span.seq, ret_sig, False, now)
        return span.seq

    def disable_in_child(self) -> None:
        self.enabled = False
        _local.inside = 0
        self._rows, self._fresh, self.dropped = [], [], 0
        self._thread = _ThreadState()
        self._main = threading.get_ident()

    # -- for taps

    def _open(self, fn: int, *, module: bool, synthetic: bool) -> _Span:
        thread = self._thread
        parent = thread.stack[-1] if thread.stack else None
        self.current_seq += 1
        span = _Span()
        span.seq, span.fn, span.module, span.synthetic = self.current_seq, fn, module, synthetic
        span.parent = parent.seq if parent else 0
        span.args = span.t = span.flags = 0
        if module and thread.modules == 1:
            span.flags |= _ROOT
        if threading.get_ident() != self._main:
            span.flags |= _THREAD
        span.site = self._site()
        span.ctx, span.outer = self._context(parent.outer if parent else "")
        thread.stack.append(span)
        return span

    def _discard(self, span: _Span) -> None:
        """Take back the span that was opened last; it writes no row."""
        if self._thread.stack and self._thread.stack[-1] is span:
            self._thread.stack.pop()

    def _refresh_context(self, span: _Span) -> None:
        """Read step, phase and modes again: the span's hook may have begun a new step."""
        stack = self._thread.stack
        at = next((i for i, s in enumerate(stack) if s is span), -1)
        if at >= 0:
            span.ctx, span.outer = self._context(stack[at - 1].outer if at else "")

    def _close(self, seq: int, ret: int, raised: bool, end_ns: int) -> None:
        thread = self._thread
        stack = thread.stack
        at = next((i for i in reversed(range(len(stack))) if stack[i].seq == seq), -1)
        if at < 0:
            return  # forgotten by a fork, or not ours
        span = stack[at]
        if raised:
            span.flags |= _RAISED
        if span.synthetic:
            del stack[at]
        else:
            # Synthetic spans that were begun inside and never ended close with the call around them.
            for orphan in reversed(stack[at + 1 :]):
                if orphan.synthetic:
                    self._write(orphan, 0, end_ns - orphan.t)
            del stack[at:]
        self._write(span, ret, end_ns - span.t)

    def _write(self, s: _Span, ret: int, dur: int) -> None:
        if len(self._rows) >= self.capacity:
            self.dropped += 1
            return
        self._rows.append((s.seq, s.parent, s.fn, s.site, s.ctx, s.args, ret, s.t, dur, s.flags))

    def _fail(self, error: BaseException) -> None:
        if _swallow(error) or self.on_error is None:
            return
        try:
            self.on_error(error)
        except BaseException as again:
            _swallow(again)

    def _signature(self, seen: set[str], describe: Callable[[int], str]) -> int:
        n = len(seen)
        if n > _NOTHING_ABOVE:
            return self.intern(_SIGNATURE, '{"e":"many"}')
        text = describe(2 if n > _NO_DIMS_ABOVE else 1 if n > _NO_SCALARS_ABOVE else 0)
        seen.add(text)
        return self.intern(_SIGNATURE, text)

    def _module_code(self, cls: type, fallback: int) -> int:
        code = self._module_codes.get(cls)
        if code is None:
            if self.module_namer is None:
                return fallback
            try:
                code = self._module_codes[cls] = int(self.module_namer(cls))
            except BaseException as error:
                self._fail(error)
                return fallback
        return code

    def _site(self) -> int:
        frame = sys._getframe(1)
        walked = 0
        while frame is not None and walked < _MAX_FRAMES:
            file = frame.f_code.co_filename
            if file != __file__:  # the extension has no frames, so ours do not count
                walked += 1
                module = frame.f_globals.get("__name__")
                ours = type(module) is str and (module == "proctor" or module.startswith("proctor."))
                if not ours and not file.startswith(("<frozen", *self._prefixes)):
                    return self.intern(_SITE, f"{file}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return 0

    def _autocast(self) -> str:
        if self._any_autocast is not None:
            try:
                if self._any_autocast() is False:
                    return ""
            except BaseException as error:
                self._fail(error)
                self._any_autocast = None
        assert self._is_autocast is not None or not self._devices
        for device in list(self._devices):
            try:
                if self._is_autocast(device) is not True:  # type: ignore[misc]
                    continue
            except BaseException as error:  # a device type that this torch does not know: ask no more
                self._fail(error)
                self._devices.remove(device)
                continue
            try:
                return str(self._autocast_dtype(device)).removeprefix("torch.")  # type: ignore[misc]
            except BaseException as error:
                self._fail(error)
                return ""
        return ""

    def _context(self, around: str) -> tuple[int, str]:
        grad, here = True, ""
        if self._is_grad is not None:
            try:
                grad = self._is_grad() is not False
            except BaseException as error:
                self._fail(error)
                self._is_grad = None
            here = self._autocast()
        outer = here or around
        if self._resolver is None:
            return self.ctx, outer
        key = (self.ctx, grad, here, outer)
        code = self._contexts.get(key)
        if code is None:
            try:
                code = int(self._resolver(*key))
            except BaseException as error:
                self._fail(error)
                code = key[0]
            if len(self._contexts) >= _MAX_CONTEXTS:
                self._contexts.clear()
            self._contexts[key] = code
        return code, outer


# -- the tap -----------------------------------------------------------------------------------------------


def _binds(wrapped: Any) -> bool:
    cls = type(wrapped)
    return hasattr(cls, "__get__") and cls is not types.MethodType and not issubclass(cls, type)


def _innermost(value: Any) -> Any:
    while type(value) in (Tap, MethodTap):
        value = _get(value, "tapped")
    return value


class Tap:
    """Stands where `wrapped` stood: calls through, and appends one row to its recorder."""

    __slots__ = (
        "__weakref__", "_after", "_args_seen", "_before", "_ret_seen", "always", "flat", "fn_code", "kind", "record", "recorder",
        "root_only", "tapped",
    )  # fmt: skip
    _OWN = frozenset(
        {"after", "always", "before", "flat", "fn_code", "kind", "record", "recorder", "root_only", "tapped", "__call__", "__copy__",
         "__deepcopy__", "__get__", "__reduce__", "__reduce_ex__"}
    )  # fmt: skip

    def __new__(
        cls,
        recorder: Recorder,
        wrapped: Callable[..., Any],
        fn_code: int,
        kind: int = 0,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> Tap:
        if type(recorder) is not Recorder:
            raise TypeError("recorder must be a Recorder")
        if not callable(wrapped):
            raise TypeError(f"{type(wrapped).__name__} is not callable")
        if not 0 <= kind <= 2:
            raise ValueError(f"kind is {kind}, expected 0 to 2")
        self = object.__new__(MethodTap if _binds(wrapped) else Tap)
        put = object.__setattr__
        put(self, "recorder", recorder)
        put(self, "tapped", wrapped)
        put(self, "fn_code", fn_code)
        put(self, "kind", kind)
        put(self, "record", True)
        put(self, "always", False)
        put(self, "root_only", False)
        put(self, "flat", False)
        put(self, "_args_seen", set())
        put(self, "_ret_seen", set())
        put(self, "before", before)
        put(self, "after", after)
        return self

    __class__ = property(lambda self: _get(self, "tapped").__class__)

    @property
    def before(self) -> Any:
        return _get(self, "_before")

    @before.setter
    def before(self, hook: Any) -> None:
        object.__setattr__(self, "_before", _hook(hook))

    @before.deleter
    def before(self) -> None:
        object.__setattr__(self, "_before", None)

    @property
    def after(self) -> Any:
        return _get(self, "_after")

    @after.setter
    def after(self, hook: Any) -> None:
        object.__setattr__(self, "_after", _hook(hook))

    @after.deleter
    def after(self) -> None:
        object.__setattr__(self, "_after", None)

    @property
    def _torchdynamo_inline(self) -> Any:
        return _get(self, "tapped")

    def __getattribute__(self, name: str) -> Any:
        if name in Tap._OWN:
            return _get(self, name)
        if name in ("__wrapped__", "_torchdynamo_inline"):
            return _get(self, "tapped")
        return getattr(_get(self, "tapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Tap._OWN:
            return setattr(_get(self, "tapped"), name, value)
        if name in ("record", "always", "root_only", "flat"):
            value = bool(value)
        elif name not in ("before", "after"):
            raise AttributeError(f"attribute {name!r} of a tap is read-only")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in Tap._OWN:
            return object.__delattr__(self, name)
        delattr(_get(self, "tapped"), name)

    def __repr__(self) -> str:
        return repr(_get(self, "tapped"))

    def __str__(self) -> str:
        return str(_get(self, "tapped"))

    def __hash__(self) -> int:
        return hash(_get(self, "tapped"))

    def __eq__(self, other: object) -> bool:
        return bool(_innermost(self) == _innermost(other))

    def __copy__(self) -> Tap:
        return self

    def __deepcopy__(self, memo: object) -> Tap:
        return self

    def __reduce__(self) -> Any:
        return _get(self, "__reduce_ex__")(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrapped = _innermost(self)
        name = wrapped.__qualname__ if type(wrapped) is types.FunctionType else wrapped.__reduce_ex__(protocol)
        if type(name) is not str:
            return name
        there: Any = sys.modules.get(wrapped.__module__)
        try:
            for part in name.split("."):
                there = getattr(there, part)
        except AttributeError:
            there = None
        if there is None or there is self or _innermost(there) is not wrapped:
            return name
        return operator.attrgetter(name), (ModuleReference(wrapped.__module__),)

    def __call__(*args: Any, **kwargs: Any) -> Any:  # no named parameter: the user's may be called `self`
        self, args = args[0], args[1:]
        tapped, recorder = _get(self, "tapped"), _get(self, "recorder")
        hooked = _get(self, "_before") is not None or _get(self, "_after") is not None
        recording = recorder.enabled and (_get(self, "record") or hooked)
        if _local.inside or not (recording or (hooked and _get(self, "always"))):
            return tapped(*args, **kwargs)
        observation = _Observation(self)
        result, raised = None, True
        try:  # one block, because Ctrl-C may land between any two lines of it
            observation.enter_safely(args, kwargs)
            result = tapped(*args, **kwargs)
            raised = False
            return result
        finally:
            observation.leave_safely(result, raised)


class MethodTap(Tap):
    """A tap around what binds as a method."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _hook(hook: Any) -> Any:
    if hook is not None and not callable(hook):
        raise TypeError("a hook must be a callable or None")
    return hook


class _Observation:
    """What happens around one call."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._recorder: Recorder = _get(tap, "recorder")
        self._span: _Span | None = None
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] | None = None
        self._counted: _ThreadState | None = None  # set for module calls
        self._hooked = True

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap, r = self._tap, self._recorder
        self._args, self._kwargs = args, dict(kwargs) if kwargs else None
        with _Inside():
            module = _get(tap, "kind") == 2
            if module:
                self._counted = r._thread
                self._counted.modules += 1
                self._hooked = self._counted.modules == 1 or not _get(tap, "root_only")
            was_enabled = r.enabled
            if was_enabled:
                self._open(args, kwargs)
            self._run("_before", self._args, self._kwargs)
            # The hook may have begun a new step, and with it switched sampling: the call belongs to the new step.
            if self._span and not r.enabled:
                r._discard(self._span)
                self._span = None
            elif self._span:
                if _get(tap, "_before") is not None:
                    r._refresh_context(self._span)
            elif r.enabled and not was_enabled:
                self._open(args, kwargs)
            if self._span:
                self._span.t = time.monotonic_ns()

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open this call's span, if the tap writes rows and this class of module is wanted."""
        tap, r = self._tap, self._recorder
        if not _get(tap, "record"):
            return
        fn = _get(tap, "fn_code")
        if self._counted is not None and args:
            fn = r._module_code(type(args[0]), fn)
            if fn & _ROOTS_ONLY:
                fn = fn & ~_ROOTS_ONLY if self._counted.modules == 1 else 0
        nested = _get(tap, "flat") and r._thread.stack and r._thread.stack[-1].fn == fn
        if not fn or nested:
            return
        span = self._span = r._open(fn, module=self._counted is not None, synthetic=False)
        span.t = time.monotonic_ns()
        span.args = r._signature(_get(tap, "_args_seen"), lambda detail: r._describer.call(args, kwargs, detail))

    def enter_safely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.enter(args, kwargs)
        except BaseException as error:
            _swallow(error)

    def leave_safely(self, result: Any, raised: bool) -> None:
        ended = time.monotonic_ns()
        try:
            with _Inside():
                self._leave(result, raised, ended)
        except BaseException as error:
            if self._span is not None:
                self._recorder._close(self._span.seq, 0, raised, ended)
            _swallow(error)
        if self._counted is not None and self._counted.modules:
            self._counted.modules -= 1

    def _leave(self, result: Any, raised: bool, ended: int) -> None:
        r, span, signature = self._recorder, self._span, 0
        # A fork inside the call forgot the span; then there is nothing to describe.
        alive = span is not None and any(s is span for s in r._thread.stack)
        if alive and not raised:
            signature = r._signature(
                _get(self._tap, "_ret_seen"), lambda detail: r._describer.value(result, detail)
            )
        self._run("_after", self._args, self._kwargs, result, raised)
        if span is not None and alive:
            r._close(span.seq, signature, raised, ended)

    def _run(self, slot: str, *args: Any) -> None:
        """A hook that fails is reported once and taken off; Ctrl-C inside it is the user's and leaves it on."""
        hook = _get(self._tap, slot)
        if hook is None or not self._hooked:
            return
        try:
            hook(*args)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and _get(self._tap, slot) is hook:
                object.__setattr__(self._tap, slot, None)
            self._recorder._fail(error)


def is_tap(value: object) -> bool:
    """True if `value` is a tap; `value.tapped` is then the original."""
    return type(value) in (Tap, MethodTap)


class ModuleReference:
    """A module by name, pickled so that loading needs nothing of ours."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return import_module, (self._name,)
