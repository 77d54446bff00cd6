"""Random operations of a parallel model are drawn by a stream; everybody else's are torch's own.

Called by `run` for the time that a model computes, and by `single` for a reference on one device. Kernels for the CPU of the
random operations are replaced once in a process (`torch.library`, below autograd and below all that is composed of them), so
that a step in which nothing is drawn costs nothing. A replaced kernel asks, in its own thread, who places the tensor:
nobody, and it calls torch's kernel; a `Place`, and the rule of `draws` draws this rank's part. An operation that torch tags
`nondeterministic_seeded` and that has no rule raises with its name and the user's line.
The same for kernels of CUDA, where there is a GPU; what only a GPU's libraries draw (cuDNN's recurrent layers, fused attention) has no rule and stops.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.instrument.patch import replaced
from proctor.oracle.parallel.draws import FIXED, Place, registry

_KEYS: Final = ("CPU", "CUDA")
# All that stands between a draw and the user: the oracle, patches, torch.
_SKIP: Final = (*(str(Path(p).resolve()) for p in (Path(__file__).parents[1], Path(replaced.__file__).parent, Path(torch.__file__).parent)), "<")
_local = threading.local()
_lock = threading.Lock()
_installed: list[torch.library.Library] = []


@contextlib.contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """Draw by `place` in this thread; None for torch's own draws."""
    install()
    before = getattr(_local, "place", None)
    _local.place = place
    try:
        yield
    finally:
        _local.place = before


def placing() -> Place | None:
    """Who places what this thread draws; None when torch draws."""
    place: Place | None = getattr(_local, "place", None)
    return place


def set_placing(place: Place | None) -> None:
    """What `placed` does, for hooks that cannot be a `with`; the kernels must be installed."""
    _local.place = place


def install() -> bool:
    """Replace the kernels, once a process; whether this call did.

    Raises:
        OracleError: this torch cannot hand out the kernel that is replaced (before 2.9).
    """
    if _installed:
        return False
    with _lock:
        if _installed:
            return False
        if not hasattr(torch.library, "get_kernel"):
            raise OracleError(f"torch {torch.__version__} cannot replace kernels", hint="upgrade torch to 2.9 or later")
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is what is asked for
            for key in _KEYS if torch.cuda.is_available() else _KEYS[:1]:
                for name in random_kernels(key):
                    library.impl(name, _replacement(name, key), key, allow_override=True)
        _installed.append(library)
        return True


def uninstall() -> None:
    """Give torch its kernels back."""
    with _lock:
        while _installed:
            _installed.pop()._destroy()


@functools.cache
def random_kernels(key: str = "CPU") -> tuple[str, ...]:
    """Overloads with a kernel of a dispatch key ("CPU", "CUDA") that torch tags as random, without those of `FIXED`."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        short = name.removeprefix("aten::")
        base, _, overload = short.partition(".")
        operation = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        tagged = operation is not None and torch.Tag.nondeterministic_seeded in operation.tags
        if tagged and short not in FIXED and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            found.append(short)
    return tuple(sorted(found))


def _replacement(name: str, key: str) -> Callable[..., Any]:
    torchs = torch.library.get_kernel(f"aten::{name}", key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    drawn = registry().get(name)

    def draw(*args: Any, **kwargs: Any) -> Any:
        place = getattr(_local, "place", None)
        if place is None:
            return torchs.call_boxed(keys, *args, **kwargs)
        asked = getattr(place, "applies", None)
        if asked is not None and not asked(args, kwargs):
            _local.place = None  # nor is what torch's kernel draws inside
            try:
                return torchs.call_boxed(keys, *args, **kwargs)
            finally:
                _local.place = place
        if drawn is None:
            raise OracleError(
                f"{name} draws random numbers and has no rule ({user_line()})",
                hint="add a file to oracle/parallel/draws, or draw with an operation that has one",
            )
        _local.place = None  # what a rule draws by torch's own kernel is not placed again
        try:
            return drawn(place, *args, **kwargs)
        finally:
            _local.place = place

    return draw


def user_line() -> str:
    """ "train.py:12 in forward": the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    for there, line in reversed(list(traceback.walk_stack(frame))[::-1]):
        file = there.f_code.co_filename
        if not file.startswith(_SKIP):
            return f"{file}:{line} in {there.f_code.co_name}"
    return "a line of torch's own"
