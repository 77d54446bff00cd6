"""Twin of the tap's own guard: while our own code runs in a thread, taps in that thread pass through.

`recorder` and `tap` count themselves in and out. `swallow` is where an error of ours ends.
"""

from __future__ import annotations

import _thread
import threading

from proctor.native.twins.handlers import from_handler, raise_later


class _Local(threading.local):
    inside = 0  # > 0: our own code runs, taps pass through
    dispatching: object = None  # the innermost tap of C code that is being called


local = _Local()


class Inside:
    def __enter__(self) -> None:
        local.inside += 1

    def __exit__(self, *exc: object) -> None:
        local.inside -= 1


def swallow(error: BaseException) -> bool:
    """Ctrl-C that lands in our own code belongs to the user, and what a handler of theirs raises: arm it again. True if it was that."""
    if from_handler(error) and raise_later(error):
        return True
    if isinstance(error, KeyboardInterrupt):
        _thread.interrupt_main()
        return True
    return False
