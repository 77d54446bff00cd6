"""Which operations of torch are asked for while one call or one step runs, and by which function of the program: used by `operations.py`.

A look is given each operation by a function mode of torch, walks up the frames to the functions of the program that asked for it, and notes it there with its place.
What comes out is `Look.told()`, from `Look.found`: `{"__main__.train": {("randn_like", …): "randn_like", ("mul", …): "mul", ("mul", …): "mul (place 2)"}}`.
"""

from __future__ import annotations

import dis
import gc
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from proctor.instrument.patch.usercode import library_prefixes
from proctor.native import is_tap

STEP: Final = "a step"
OPENING: Final = ", up to its first update"  # behind a function that was looked at so far
_NAMES: Final = 128  # of one function, in one look
_FUNCTIONS: Final = 64  # in one look
_FRAMES: Final = 80  # up from an operation
_OPERATIONS: Final = 20_000  # of one look
_HIDDEN: Final = ("torch.optim", "torch.nn.utils", "torch.distributed", "torch.utils", "torch.amp", "torch.cuda")  # whose own arithmetic goes by options and devices
_RUNS: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"})  # parts of the function that they stand in
_TURNS: Final = frozenset({"permute", "transpose", "movedim"})  # told with the dimensions, too: these are no sizes
# What only says how elements lie, or asks what a tensor is: written in one way or another, and without a meaning of its own.
_LAYOUT: Final = frozenset(
    """view reshape flatten unflatten contiguous expand expand_as view_as reshape_as size dim ndimension numel nelement stride storage_offset is_contiguous item tolist numpy cpu
    data_ptr element_size untyped_storage type is_floating_point is_complex get_device requires_grad_ retain_grad register_hook __get__ __set__ __len__ __iter__ __repr__ __format__
    __bool__ __int__ __float__ __index__ __contains__ __hash__ __deepcopy__ __reduce_ex__ __setstate__ to pin_memory cuda is_pinned is_same_size is_shared share_memory_""".split()
)


class Look:
    """What one call uses, or one step."""

    def __init__(self, function: str, call: int, updates: int, *, opening: bool = False) -> None:
        self.function, self.call, self.updates, self.opening = function, call, updates, opening
        self.found: dict[str, dict[tuple[str, int, int], str]] = {}  # of each function: operation and place, in the order of first uses, and its name
        self.modes: dict[str, set[str]] = {}  # of methods of modules: in which their module was
        self.methods: set[str] = set()
        self.guess = False  # nobody knows whether it contains updates
        self.running: set[str] = set()  # functions that still run when it is told of
        self.whole = True  # all of it was seen
        self.error: Exception | None = None
        self._left = _OPERATIONS
        outside = _outside(sys._getframe())
        # Frames by their numbers: one that is held holds all that its function does. Where a call ends, and from the innermost, the loops that a step begins in.
        self._end = None if function == STEP else id(outside)
        self._loops: list[tuple[int, str]] | None = None
        self.begun: dict[str, set[str]] = {}  # of functions that a step begins in: what they had called
        if function == STEP:
            self._loops, self.begun = _loops(outside)
        self._mode = _mode(self.used)
        self._on = False

    def begins(self) -> None:
        from torch.overrides import _get_current_function_mode

        if self._loops is not None and _get_current_function_mode() is not None:
            self._left = 0  # a mode of the program's may end within the step, and would take ours off in its own place
            return
        self._mode.__enter__()
        self._on = True
        _LOOKING.append(self)

    def ends(self) -> bool:
        """Take the mode off; whether that is done. One that the program put above it, and left there, has the effects that ours has."""
        from torch.overrides import _get_current_function_mode

        self._left = 0
        if self._on and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._on = False
            _LOOKING.remove(self)
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

    def enters(self, function: str, mode: str, *, seen: bool = True) -> None:
        """A method is called, or left, whose module trains or evaluates; `seen` of those that are told of even if they use nothing."""
        if function in self.modes or len(self.modes) < _FUNCTIONS:
            self.modes.setdefault(function, set()).add(mode)
            if seen:
                self.methods.add(function)

    def mode_of(self, function: str) -> str:
        """The mode of a method's module; "" where it is no such method, or was called in both."""
        found = self.modes.get(function, set())
        return next(iter(found)) if len(found) == 1 else ""

    def on_the_stack(self) -> set[str]:
        """Functions of the program that run now, within what is looked at."""
        frame, found = _outside(sys._getframe()), {self.function}
        while frame is not None and id(frame) != self._end:
            if whose(frame.f_code, frame.f_globals) == "user":
                found.add(_called(frame.f_code, frame))
            frame = frame.f_back
        return found

    def told(self) -> dict[str, list[str]]:
        """What each function used; of methods that were called and used nothing, that."""
        used = {function or self.function: list(names.values()) for function, names in self.found.items()}
        idle = self.methods if self.function != STEP else ()
        return used | {function: [] for function in idle if function not in used}

    def happens(self, what: str) -> None:
        """What is no operation, wherever it is asked for."""
        frame = _outside(sys._getframe())
        while frame is not None and id(frame) != self._end and whose(frame.f_code, frame.f_globals) != "user":
            frame = frame.f_back
        if frame is not None and id(frame) != self._end:
            self.used(what, frame)

    def _place(self, name: str, frame: types.FrameType | None) -> None:
        inner = ""
        for _ in range(_FRAMES):
            if frame is None or id(frame) == self._end:
                break
            code = frame.f_code
            owner = whose(code, frame.f_globals)
            if owner == "ours" or (owner in ("hidden", "library") and not inner) or (owner == "hidden" and self._loops is not None):
                return
            if owner == "user" and code.co_name not in _RUNS:
                looped = self._looped(frame)
                if self._loops is None or looped or _of_autograd(frame):
                    self._note(_called(code, frame), f"{inner}()" if inner else name, (id(code), frame.f_lasti))
                if looped:
                    return  # who has called it did so before the step began
                inner = code.co_name
            frame = frame.f_back
        if not inner and self._loops is None:
            self._note("", name, (0, 0))

    def _looped(self, frame: types.FrameType) -> bool:
        """Whether a step began in this frame. Loops within it have ended, then, and what was seen of them is a part of a step."""
        at = next((i for i, (number, _) in enumerate(self._loops or ()) if number == id(frame)), None)
        if at is None or self._loops is None:
            return False
        for _, function in self._loops[:at]:
            self.found.pop(function, None)
        del self._loops[:at]
        return True

    def _note(self, function: str, name: str, place: tuple[int, int]) -> None:
        used = self.found.get(function)
        if used is None:
            if len(self.found) >= _FUNCTIONS:
                self.whole = False
                return
            used = self.found[function] = {}
        if (name, *place) in used:
            return
        if len(used) >= _NAMES:
            self.whole = False
            return
        before = sum(other == name for other, _, _ in used)
        used[name, *place] = f"{name} (place {before + 1})" if before else name


def _dimensions(given: tuple[Any, ...]) -> str:
    """Dimensions that an operation was given, as its program writes them; "" where they are no plain numbers."""
    numbers = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    return ",".join(map(str, numbers)) if all(type(n) is int for n in numbers) else ""


_LOOKING: list[Look] = []  # whose mode is on


def _forked() -> None:
    """A child computes without it."""
    for look in list(_LOOKING):
        look.ends()


os.register_at_fork(after_in_child=_forked)


def _loops(frame: types.FrameType | None) -> tuple[list[tuple[int, str]], dict[str, set[str]]]:
    """Frames of functions of the program, from the innermost, that stand in a loop now, with their names; and what each of these has called that still runs."""
    found: list[tuple[int, str]] = []
    begun: dict[str, set[str]] = {}
    inner = ""
    while frame is not None:
        code = frame.f_code
        if whose(code, frame.f_globals) == "user":
            if any(first <= frame.f_lasti <= last for first, last in _spans(code)):
                found.append((id(frame), _called(code, frame)))
                if inner:
                    begun.setdefault(found[-1][1], set()).add(f"{inner}()")
            if code.co_name not in _RUNS:
                inner = code.co_name
        frame = frame.f_back
    return found, begun


def _spans(code: types.CodeType) -> list[tuple[int, int]]:
    """Where the loops of a function begin and end: what a jump goes back over."""
    if code not in _SPANS:
        jumps = [(i.argval, i.offset) for i in dis.get_instructions(code) if "JUMP" in i.opname]
        _SPANS[code] = [(to, at) for to, at in jumps if type(to) is int and to <= at]
    return _SPANS[code]


def _of_autograd(frame: types.FrameType) -> bool:
    """Whether this is the forward of an autograd function, of which no call is recorded. Torch takes modes off while a backward runs."""
    by = frame.f_back
    return by is not None and str(by.f_globals.get("__name__", "")).startswith("torch.autograd")


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
                    if name in _TURNS and (turned := _dimensions(args[1:])):
                        self.tell(f"{name}({turned})", frame)
                return _original(func, name, frame)(*args, **(kwargs or {}))

        _MODES.append(Watching)
    return _MODES[0](used)


def _original(func: Any, name: str, frame: types.FrameType) -> Any:
    """What torch would go on with if no mode were on.

    Torch asks for functions again by their names, so a mode is handed what stands there: a tap of ours, or a wrapper of the program's, that this call has gone through already.
    """
    while is_tap(func):
        func = func.tapped
    if type(func) is not types.FunctionType:
        return func
    import torch

    if frame.f_code is not torch.overrides.handle_torch_function.__code__ or frame.f_back is None:  # C++ asks
        return next((found for home in (torch._C.TensorBase, torch._VF) if (found := getattr(home, name, None)) is not None), func)
    body = frame.f_back.f_code
    code = getattr(func, "__code__", None)
    if code is body:
        return func
    if code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return func  # torch's own way: one function that stands for several
    if body not in _BODIES:
        _BODIES[body] = next((f for f in gc.get_referrers(body) if type(f) is types.FunctionType and f.__code__ is body), func)
    return _BODIES[body]


_MODES: list[Any] = []
_SPANS: dict[types.CodeType, list[tuple[int, int]]] = {}
_BODIES: dict[types.CodeType, Any] = {}
_KNOWN: dict[types.CodeType, str] = {}
_PREFIXES: list[tuple[str, ...]] = []


def whose(code: types.CodeType, home: dict[str, Any]) -> str:
    """Whose this code is, by the globals that it runs with: `user`, `torch`, `library`, `hidden` parts of torch, `ours`."""
    known = _KNOWN.get(code)
    if known is None:
        if not _PREFIXES:
            _PREFIXES.append(library_prefixes())
        module = str(home.get("__name__", ""))
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
    """Its name as it is tapped: a class holds `__shift` by the name `_Net__shift`."""
    module = str(frame.f_globals.get("__name__", ""))
    owner, _, own = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    if own.startswith("__") and not own.endswith("__") and (kind := owner.rpartition(".")[2].lstrip("_")):
        own = f"_{kind}{own}"
    return ".".join(part for part in ("__main__" if module == "__mp_main__" else module, owner, own) if part)


def _outside(frame: types.FrameType | None) -> types.FrameType | None:
    """The nearest frame that is not ours."""
    while frame is not None and whose(frame.f_code, frame.f_globals) == "ours":
        frame = frame.f_back
    return frame


def _plain(name: str) -> str:
    """`add` for `__iadd__` and `__radd__`: an operator is written in one way or another."""
    found = re.fullmatch(r"__[ir]?(add|sub|mul|div|truediv|matmul|pow|mod|floordiv|and|or|xor)__", name)
    return {"truediv": "div"}.get(found[1], found[1]) if found else name
