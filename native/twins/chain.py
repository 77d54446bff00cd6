"""`calls/chain.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Hook = tuple[str, bool, Callable[..., Any]]
_ASIDE, _FOREIGN = 1, 2
_LOOKED = 64  # of what a container holds


class Chain:
    """The hooks of one function as one.

    Args:
        hooks: (label, always, function) of each, in order; without a label it guards itself and runs in any case.
        wants: whether those with a label are to run.
        off: labels of those that run no more, since one raised.
        over: labels of those that run no more, since they have nothing left to do.
        takes: is given the label and the error of one that raised; where it says no, the error goes on.
        modes: each counts modes of the program's that are on.
        aside: is given `run` and its arguments where one is, or where an argument of the call or its result is of a class with a `__torch_function__` of its own.
        tensor: class of tensors, which has one; where another such class is none of tensors, what its objects are only the program's code could tell.
        parameter: class of parameters.
        dispatched: whether none with a label runs where there is such an object.
    """

    def __init__(
        self, hooks: tuple[Hook, ...], wants: Callable[[], bool], off: set[str], over: set[str], takes: Callable[[str, Exception], bool],
        modes: tuple[Callable[[], int], ...], aside: Callable[[Callable[..., None], tuple[Any, ...]], None],
        tensor: type, parameter: type, dispatched: bool = False,
    ) -> None:  # fmt: skip
        self._hooks, self._wants, self._off, self._over, self._takes, self._modes, self._aside = hooks, wants, off, over, takes, modes, aside
        self._tensor, self._parameter, self._dispatched = tensor, parameter, dispatched

    def __call__(self, *args: Any) -> None:
        """The hooks, without modes of the program's."""
        if self._of_call(args) or any(on() for on in self._modes):
            self._aside(self.run, args)
        else:
            self._run(args, foreign=False)

    def run(self, *args: Any) -> None:
        """The hooks, whatever modes are on."""
        self._run(args, foreign=self._dispatched and self._of_call(args) == _FOREIGN)

    def _run(self, args: tuple[Any, ...], *, foreign: bool) -> None:
        wanted = None  # asked behind the given ones, which may begin a step
        for label, always, hook in self._hooks:
            if not label:
                hook(*args)
                continue
            if foreign:
                continue
            if wanted is None:
                wanted = self._wants()
            if (wanted or always) and label not in self._over and label not in self._off:
                try:
                    hook(*args)
                except Exception as e:
                    if not self._takes(label, e):
                        raise

    def _of_call(self, args: tuple[Any, ...]) -> int:
        return max((self._of(value, 2 if i < 2 else 1) for i, value in enumerate(args[:3])), default=0)

    def _of(self, value: Any, depth: int) -> int:
        kind = type(value)
        if kind in (tuple, list, dict):
            within = itertools.islice(value.values() if kind is dict else value, _LOOKED if depth else 0)
            return max((self._of(one, depth - 1) for one in within), default=0)
        if kind is self._tensor or kind is self._parameter or not any("__torch_function__" in base.__dict__ for base in kind.__mro__):
            return 0
        return _ASIDE if issubclass(kind, self._tensor) else _FOREIGN
