"""Twin of `recorder.h`: the rows of calls, and the names and contexts that they speak of.

Taps open and close spans; the observer sets what is known (types, prefixes, the present context) and drains rows once a
second. In: codes, signatures and times. Out: columns as the native code gives them. A row more than `capacity` is dropped
and counted.
"""

# ruff: noqa: BLE001  (whatever goes wrong in here, nothing of it may reach the user's call)

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from proctor.native.twins.describe import Describer, clean
from proctor.native.twins.inside import Inside, local, swallow

_MAX_FRAMES = 24
_MAX_CONTEXTS = 1 << 12
_NO_SCALARS_ABOVE, _NO_DIMS_ABOVE, _NOTHING_ABOVE = 128, 1024, 4096
_RAISED, _ROOT, _THREAD = 1, 2, 4
_SIGNATURE, _SITE = 2, 1
_TWINS = frozenset(str(Path(__file__).with_name(name)) for name in ("describe.py", "inside.py", "recorder.py", "tap.py"))
_COLUMNS = (
    ("seq", np.uint32), ("parent", np.uint32), ("fn", np.uint32), ("site", np.uint32), ("ctx", np.uint32),
    ("args", np.uint32), ("ret", np.uint32), ("t", np.int64), ("dur", np.int64), ("flags", np.uint8),
)  # fmt: skip


class Span:
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


class ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[Span] = []
        self.modules = 0


# More than 25 methods: those of the native class, one by one.
class Recorder:
    """Rows of calls, names and contexts of this process. Created disabled."""

    def __init__(self) -> None:
        self.enabled = False
        self.muted = False  # calls are recorded, and no values
        self.asleep = False
        self.ctx = 0
        self.capacity = 4_000_000
        self.dropped = 0
        self.current_seq = 0
        self.on_error: Callable[[BaseException], object] | None = None
        self.module_namer: Callable[[type], int] | None = None
        self._describer = Describer()
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
        self._thread = ThreadState()
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
        self._describer.tracked = {i: clean(n) for i, n in names.items()}

    def track(self, id: int, name: str) -> None:
        self._describer.tracked[id] = clean(name)

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
        names, text = self._names[kind], clean(text)
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

    # -- steps that nobody looks at: the twin has hooks only, and never falls asleep

    def sleep(self, tell: Callable[[tuple[Any, ...], str, tuple[int, ...], int, int], object]) -> bool:
        return False

    def wake(self) -> tuple[str, tuple[int, ...], int, list[tuple[Any, int]], int, int]:
        return "", (), 0, [], 0, 0

    def expect(self, cycle: tuple[tuple[str, tuple[int, ...], int], ...], limit: int) -> None:
        pass

    def open_acts(self) -> tuple[int, int, list[tuple[int, tuple[Any, ...] | None, tuple[str, ...] | None, int, int]]]:
        return 0, 0, []

    # -- synthetic rows

    def begin(self, fn: int, args_sig: int = 0) -> int:
        if not self.enabled:
            return 0
        with Inside():
            span = self._open(fn, module=False, synthetic=True)
        span.args, span.t = args_sig, time.monotonic_ns()
        return span.seq

    def end(self, seq: int, ret_sig: int = 0, raised: bool = False) -> None:
        if seq:
            self._close(seq, ret_sig, raised, time.monotonic_ns())

    def record_call(self, fn: int, args_sig: int, ret_sig: int, dur_ns: int = 0) -> int:
        if not self.enabled:
            return 0
        with Inside():
            span = self._open(fn, module=False, synthetic=True)
        now = time.monotonic_ns()
        span.args, span.t = args_sig, now - dur_ns
        self._close(span.seq, ret_sig, False, now)
        return span.seq

    def wants_values(self) -> bool:
        """Whether values are recorded now."""
        return self.enabled and not self.muted

    def disable_in_child(self) -> None:
        self.enabled = False
        local.inside = 0
        self._rows, self._fresh, self.dropped = [], [], 0
        self._thread = ThreadState()
        self._main = threading.get_ident()

    # -- for taps

    def _open(self, fn: int, *, module: bool, synthetic: bool) -> Span:
        thread = self._thread
        parent = thread.stack[-1] if thread.stack else None
        self.current_seq += 1
        span = Span()
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

    def _discard(self, span: Span) -> None:
        """Take back the span that was opened last; it writes no row."""
        if self._thread.stack and self._thread.stack[-1] is span:
            self._thread.stack.pop()

    def _refresh_context(self, span: Span) -> None:
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

    def _write(self, s: Span, ret: int, dur: int) -> None:
        if len(self._rows) >= self.capacity:
            self.dropped += 1
            return
        self._rows.append((s.seq, s.parent, s.fn, s.site, s.ctx, s.args, ret, s.t, dur, s.flags))

    def _fail(self, error: BaseException) -> None:
        if swallow(error) or self.on_error is None:
            return
        try:
            self.on_error(error)
        except BaseException as again:
            swallow(again)

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
            if file not in _TWINS:  # the extension has no frames, so ours do not count
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
