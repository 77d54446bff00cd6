"""Twin of `tap.h`: what stands in a function's place, calls through, and hands one row to its recorder.

`instrument.patch` makes taps. Promise: the same result and the same exception as without it, also where a hook of ours fails
or Ctrl-C lands in our code. Fallback where the extension is missing, and what it is tested against: same classes, same
results, slower. torch.compile traces into a frame of this twin (the extension has none): graph breaks where it taps
compiled code.
"""

# ruff: noqa: BLE001  (whatever goes wrong in here, nothing of it may reach the user's call)

from __future__ import annotations

import operator
import sys
import time
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

from proctor.native.twins.describe import TAPS, get
from proctor.native.twins.handlers import from_handler
from proctor.native.twins.inside import Inside, local, swallow
from proctor.native.twins.recorder import Recorder, Span, ThreadState

ROOTS_ONLY = 1 << 31  # in a module code: wanted as the outermost module only


def _binds(wrapped: Any) -> bool:
    cls = type(wrapped)
    return hasattr(cls, "__get__") and cls is not types.MethodType and not issubclass(cls, type)


def _innermost(value: Any) -> Any:
    while type(value) in (Tap, MethodTap):
        value = get(value, "tapped")
    return value


_METHOD = 1  # kind of a tap: it stands on a class


class Tap:
    """Stands where `wrapped` stood: calls through, and appends one row to its recorder."""

    __slots__ = (
        "__dict__", "__weakref__", "_after", "_args_seen", "_before", "_ret_seen", "act", "always", "flat", "fn_code", "group_at", "kind", "record", "recorder",
        "root_only", "tapped",
    )  # fmt: skip
    _OWN = frozenset(
        {"act", "after", "always", "before", "flat", "fn_code", "group_at", "kind", "record", "recorder", "root_only", "tapped", "__call__", "__copy__",
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
        if not 0 <= kind <= 3:
            raise ValueError(f"kind is {kind}, expected 0 to 3")
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
        put(self, "act", 0)
        put(self, "group_at", -1)
        put(self, "_args_seen", set())
        put(self, "_ret_seen", set())
        put(self, "before", before)
        put(self, "after", after)
        # Where Dynamo looks for it without running a getter (`inspect.getattr_static`): a property of the class would be what it finds.
        own, theirs = get(self, "__dict__"), getattr(wrapped, "__dict__", None)
        own.update({**theirs} if isinstance(theirs, dict) else {})
        if _followed_by_name(self):
            own["_torchdynamo_inline"] = wrapped
        return self

    __class__ = property(lambda self: get(self, "tapped").__class__)

    @property
    def before(self) -> Any:
        return get(self, "_before")

    @before.setter
    def before(self, hook: Any) -> None:
        object.__setattr__(self, "_before", _hook(hook))

    @before.deleter
    def before(self) -> None:
        object.__setattr__(self, "_before", None)

    @property
    def after(self) -> Any:
        return get(self, "_after")

    @after.setter
    def after(self, hook: Any) -> None:
        object.__setattr__(self, "_after", _hook(hook))

    @after.deleter
    def after(self) -> None:
        object.__setattr__(self, "_after", None)

    def __getattribute__(self, name: str) -> Any:
        if name in Tap._OWN:
            return get(self, name)
        if name == "__wrapped__" or (name == "_torchdynamo_inline" and _followed_by_name(self)):
            return get(self, "tapped")
        return getattr(get(self, "tapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Tap._OWN:
            return setattr(get(self, "tapped"), name, value)
        if name in ("record", "always", "root_only", "flat"):
            value = bool(value)
        elif name in ("act", "group_at"):
            value = operator.index(value)
        elif name not in ("before", "after"):
            raise AttributeError(f"attribute {name!r} of a tap is read-only")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in Tap._OWN:
            return object.__delattr__(self, name)
        delattr(get(self, "tapped"), name)

    def __repr__(self) -> str:
        return repr(get(self, "tapped"))

    def __str__(self) -> str:
        return str(get(self, "tapped"))

    def __hash__(self) -> int:
        return hash(get(self, "tapped"))

    def __eq__(self, other: object) -> bool:
        return bool(_innermost(self) == _innermost(other))

    def __copy__(self) -> Tap:
        return self

    def __deepcopy__(self, memo: object) -> Tap:
        return self

    def __reduce__(self) -> Any:
        return get(self, "__reduce_ex__")(2)

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
        tapped, recorder = get(self, "tapped"), get(self, "recorder")
        if get(self, "kind") == 3:
            before, local.inside = local.inside, local.inside + 1  # put back as it was: a fork inside the call forgets it
            try:
                return tapped(*args, **kwargs)
            finally:
                local.inside = before
        hooked = get(self, "_before") is not None or get(self, "_after") is not None
        recording = recorder.enabled and (get(self, "record") or hooked)
        if local.inside or local.dispatching is self or not (recording or (hooked and get(self, "always"))):
            return tapped(*args, **kwargs)
        observation, dispatching = _Observation(self), local.dispatching
        result, raised = None, True
        try:  # one block, because Ctrl-C may land between any two lines of it
            if type(tapped) in (types.BuiltinFunctionType, types.MethodDescriptorType):
                local.dispatching = self
            observation.enter_safely(args, kwargs)
            result = tapped(*args, **kwargs)
            raised = False
            return result
        finally:
            local.dispatching = dispatching
            observation.leave_safely(result, raised)


class MethodTap(Tap):
    """A tap around what binds as a method."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


TAPS.update((Tap, MethodTap))


def _followed_by_name(tap: Tap) -> bool:
    """Whether Dynamo reaches what is wrapped by an attribute: of a method it would lose the instance behind a graph break."""
    return get(tap, "kind") != _METHOD or not isinstance(get(tap, "tapped"), types.FunctionType)


def _hook(hook: Any) -> Any:
    if hook is not None and not callable(hook):
        raise TypeError("a hook must be a callable or None")
    return hook


class _Observation:
    """What happens around one call."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._recorder: Recorder = get(tap, "recorder")
        self._span: Span | None = None
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] | None = None
        self._counted: ThreadState | None = None  # set for module calls
        self._hooked = True

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap, r = self._tap, self._recorder
        self._args, self._kwargs = args, dict(kwargs) if kwargs else None
        with Inside():
            module = get(tap, "kind") == 2
            if module:
                self._counted = r._thread
                self._counted.modules += 1
                self._hooked = self._counted.modules == 1 or not get(tap, "root_only")
            was_enabled = r.enabled
            if was_enabled:
                self._open(args, kwargs)
            self._run("_before", self._args, self._kwargs)
            # The hook may have begun a new step, and with it switched sampling: the call belongs to the new step.
            if self._span and not r.enabled:
                r._discard(self._span)
                self._span = None
            elif self._span:
                if get(tap, "_before") is not None:
                    r._refresh_context(self._span)
            elif r.enabled and not was_enabled:
                self._open(args, kwargs)
            if self._span:
                self._span.t = time.monotonic_ns()

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open this call's span, if the tap writes rows and this class of module is wanted."""
        tap, r = self._tap, self._recorder
        if not get(tap, "record"):
            return
        fn = get(tap, "fn_code")
        if self._counted is not None and args:
            fn = r._module_code(type(args[0]), fn)
            if fn & ROOTS_ONLY:
                fn = fn & ~ROOTS_ONLY if self._counted.modules == 1 else 0
        nested = get(tap, "flat") and r._thread.stack and r._thread.stack[-1].fn == fn
        if not fn or nested:
            return
        span = self._span = r._open(fn, module=self._counted is not None, synthetic=False)
        span.t = time.monotonic_ns()
        span.args = r._signature(get(tap, "_args_seen"), lambda detail: r._describer.call(args, kwargs, detail))

    def enter_safely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.enter(args, kwargs)
        except BaseException as error:
            swallow(error)

    def leave_safely(self, result: Any, raised: bool) -> None:
        ended = time.monotonic_ns()
        try:
            with Inside():
                self._leave(result, raised, ended)
        except BaseException as error:
            if self._span is not None:
                self._recorder._close(self._span.seq, 0, raised, ended)
            swallow(error)
        if self._counted is not None and self._counted.modules:
            self._counted.modules -= 1

    def _leave(self, result: Any, raised: bool, ended: int) -> None:
        r, span, signature = self._recorder, self._span, 0
        # A fork inside the call forgot the span; then there is nothing to describe.
        alive = span is not None and any(s is span for s in r._thread.stack)
        if alive and not raised:
            signature = r._signature(
                get(self._tap, "_ret_seen"), lambda detail: r._describer.value(result, detail)
            )
        self._run("_after", self._args, self._kwargs, result, raised)
        if span is not None and alive:
            r._close(span.seq, signature, raised, ended)

    def _run(self, slot: str, *args: Any) -> None:
        """A hook that fails is reported once and taken off; Ctrl-C inside it is the user's and leaves it on."""
        hook = get(self._tap, slot)
        if hook is None or not self._hooked:
            return
        try:
            hook(*args)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and not from_handler(error) and get(self._tap, slot) is hook:
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
