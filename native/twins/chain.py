"""`calls/chain.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hook = tuple[str, bool, Callable[..., Any]]


class Chain:
    """The hooks of one function as one.

    Args:
        hooks: (label, always, function) of each, in order; without a label it guards itself and runs in any case.
        wants: whether those with a label are to run.
        off: labels of those that run no more, since one raised.
        over: labels of those that run no more, since they have nothing left to do.
        takes: is given the label and the error of one that raised; where it says no, the error goes on.
        modes: each counts modes of the program's that are on.
        aside: is given `run` and its arguments where one is.
    """

    def __init__(
        self, hooks: tuple[Hook, ...], wants: Callable[[], bool], off: set[str], over: set[str], takes: Callable[[str, Exception], bool],
        modes: tuple[Callable[[], int], ...], aside: Callable[[Callable[..., None], tuple[Any, ...]], None],
    ) -> None:  # fmt: skip
        self._hooks, self._wants, self._off, self._over, self._takes, self._modes, self._aside = hooks, wants, off, over, takes, modes, aside

    def __call__(self, *args: Any) -> None:
        """The hooks, without modes of the program's."""
        if any(on() for on in self._modes):
            self._aside(self.run, args)
        else:
            self.run(*args)

    def run(self, *args: Any) -> None:
        """The hooks, whatever modes are on."""
        wanted = None  # asked behind the given ones, which may begin a step
        for label, always, hook in self._hooks:
            if not label:
                hook(*args)
                continue
            if wanted is None:
                wanted = self._wants()
            if (wanted or always) and label not in self._over and label not in self._off:
                try:
                    hook(*args)
                except Exception as e:
                    if not self._takes(label, e):
                        raise
