"""What a signal handler of the program's raises while our own code runs is the program's: a SystemExit on SIGTERM, a TimeoutError on SIGALRM.

Twin of native/handlers.h. The native code raises the same object again; here it is one of a class derived from its own, with the same arguments, as
Python has no other way to raise something later in the main thread.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Final

_MARK: Final = "_of_a_handler"


def from_handler(error: BaseException) -> bool:
    """Whether an exception was raised by a signal handler of the program's; that is no error of ours. Known by the handler's frame."""
    if hasattr(type(error), _MARK):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None} if error.__traceback__ is not None else set()
    entry = error.__traceback__ if codes else None
    while entry is not None:
        if entry.tb_frame.f_code in codes:
            return True
        entry = entry.tb_next
    return False


def raise_later(error: BaseException) -> bool:
    """Raise it in the main thread as soon as that runs Python again. Whether that is possible."""
    kind = type(error)
    made: type[BaseException] = kind
    if not hasattr(kind, _MARK):
        arguments = error.args

        def begin(self: BaseException) -> None:
            kind.__init__(self, *arguments)

        try:
            made = type(kind.__name__, (kind,), {_MARK: True, "__init__": begin, "__module__": kind.__module__})
            made()
        except Exception:  # noqa: BLE001 - a class with rules of its own
            return False
    import ctypes  # late: only an exception comes here

    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    reached: int = ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(made))
    return reached == 1


def _code(handler: Any) -> Any:
    """The code that runs when a handler is called; `None` where that is no Python function."""
    for _ in range(4):
        if hasattr(handler, "__code__"):
            return handler.__code__
        inner = getattr(handler, "__func__", None) or getattr(handler, "func", None)
        handler = inner if inner is not None else getattr(type(handler), "__call__", None)  # noqa: B004 - the function itself is wanted
    return None
