"""What the probes of libraries share: what they say, which optimizers there are, and what is whose."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from proctor.instrument.probes import Probe, Sink
from proctor.invariants.schema import Value

MADE: Final = "torch.optim.Optimizer.__init__"
UPDATE: Final = "torch.optim.Optimizer.step"
BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})
_ROWS: Final = 16  # of each mode, of what is well and of what is not
_OPTIMIZERS: Final = 16


class Usage(Probe):
    """Rows of `Value.USAGE`: whether a library is used as it is meant, once for each time that it showed.

    Attributes:
        over: steps or calls are left out from now on, so that nothing is told of what did not happen.
    """

    kinds = frozenset({Value.USAGE})
    library: ClassVar[str]

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.over = False
        self._said: dict[tuple[str, bool], int] = {}
        self._optimizers: list[weakref.ref[Any]] = []

    def thinned(self) -> None:
        self.over = True

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:
        self.over = True

    def say(self, mode: str, place: str, seen: str = "", *, call: int | None = None) -> None:
        """A row: all is well where nothing is seen."""
        said = self._said.get((mode, bool(seen)), 0)
        if said < _ROWS:
            self._said[mode, bool(seen)] = said + 1
            self.sink.number(place, float(bool(seen)), kind=Value.USAGE, facts={"library": self.library, "mode": mode, "seen": seen}, call=call)

    def made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        """Behind an optimizer's constructor."""
        if not raised:
            self._optimizers = [ref for ref in self._optimizers if ref() is not None]
            if len(self._optimizers) < _OPTIMIZERS:
                self._optimizers.append(weakref.ref(args[0]))

    def held(self) -> Iterator[Any]:
        """What the optimizers hold that are there."""
        for ref in self._optimizers:
            optimizer = ref()
            for group in () if optimizer is None else optimizer.param_groups:
                yield from group["params"]
