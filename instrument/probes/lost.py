"""Whether what backward passes gave is cleared before an update has applied it.

Rows of `Value.KEPT`, `lost`, at the first updates of each optimizer. Several backward passes from one line lie between two updates, as where microbatches are accumulated: the update is to
apply all of them. It does not where `zero_grad` comes between them. Sure of that is only who saw: no optimizer updated in between (the loss of a generator fills the gradients
of its critic, which are cleared rightly), the clearing left no gradient of any optimizer (what else the pass was for would be there), no parameter was moved by hand, and the update applies the last pass as it was given (who reads gradients of
single samples or tasks, and clears them, puts together what it applies). One skipped batch, or a loss scaler that finds its factor, is not several updates in a row.

Cost: some Python at each backward pass, clearing and update, until the first updates are over; a device is not asked.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_MADE: Final = "torch.optim.Optimizer.__init__"
_CLEARS: Final = frozenset({"torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad"})
_BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})
_REWRITES: Final = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_", "torch.amp.GradScaler.unscale_"})
_OPTIMIZERS: Final = 8
_UPDATES: Final = 16  # of an optimizer, on the mean
_TIMES: Final = 3  # updates in a row before which gradients were lost
_LOOKED_AT: Final = 64  # parameters of each optimizer


class _Known:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.ref = weakref.ref(optimizer)
        self.updates = 0
        self.times = 0  # updates in a row that lost some
        self.lines: list[str] = []  # of the backward passes since its last update
        self.lost: list[str] = []  # of those of them whose gradients are gone
        self.given: list[tuple[int, int]] = []  # ids and versions of its gradients, as the last pass or clipping left them
        self.weights: list[int] = []  # versions of its parameters then: who moves them by hand has applied the pass

    def held(self, most: int | None = None) -> Iterator[Any]:
        optimizer = self.ref()
        every = () if optimizer is None else (p for group in optimizer.param_groups for p in group["params"] if p.is_leaf)
        return islice(every, most)

    def versions(self) -> list[int]:
        return [_version(p) for p in self.held(_LOOKED_AT)]


@register
class Lost(Probe):
    """Gradients that were cleared before they were applied."""

    name = "lost"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: dict[int, _Known] = {}
        self._prefixes = library_prefixes()
        self._within = 0  # updates that run: a closure's backward passes are their own
        self._depth = 0  # of passes: one function calls the other
        self._cleared_since = False  # the last pass
        self._over = False

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _BACKWARDS:
            return self._propagates, self._propagated
        if function in _CLEARS:
            return None, self._cleared
        if function in _REWRITES:
            return None, self._rewritten
        return {_MADE: (None, self._made), _UPDATE: (self._updates, self._updated)}.get(function, NO_HOOKS)

    def thinned(self) -> None:
        self._over = True  # a pass or a clearing would be missed

    def slept(self, backwards: int, collectives: list[tuple[Any, int]]) -> None:
        self._over = True

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if raised:
            return
        if len(self._known) >= _OPTIMIZERS:
            self._over = True  # of more nobody knows whose gradients a clearing left
        self._known[id(args[0])] = _Known(args[0])

    def _propagates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._depth += 1
        if self._cleared_since and self._depth == 1 and not self._within:
            self._cleared_since = False
            self._settle()

    def _settle(self) -> None:
        """Between two passes something was cleared: what the first gave is lost, unless some of it is left, or zeros in its place, or parameters have moved: that may be what it was for."""
        read = self.sink.gradients(p for known in self._known.values() for p in known.held())
        left = read is None or any(grad is not None for grad in read)
        left = left or any(known.given and known.versions() != known.weights for known in self._known.values())
        for known in self._known.values():
            if left:
                known.lines, known.lost = [], []
            elif known.given:
                known.lost = list(known.lines)
            known.given = []

    def _propagated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or self._over or self._within or raised:
            return
        line = self._line()
        for known in self._known.values():
            known.lines.append(line)
        self._rewritten(args, kwargs, result, raised)

    def _rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        for known in () if self._over else self._known.values():
            known.given, known.weights = self._gradients(known), known.versions()

    def _cleared(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._cleared_since = not self._over and not self._within and any(known.lines for known in self._known.values())

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._within += 1
        known = self._known.get(id(args[0]))
        if self._over or known is None or known.ref() is not args[0]:
            return
        last = known.lines[-1] if len(known.lines) > len(known.lost) else ""
        lost = sum(line == last for line in known.lost)
        as_given = bool(known.given) and self._gradients(known) == known.given
        known.times = known.times + 1 if last and lost and as_given else 0
        known.updates += 1
        if known.times == _TIMES or (len(known.lines) > 1 and not known.lost):
            seen = f"{lost} of {lost + 1} backward passes of {last} before an update of {type(args[0]).__name__} had their gradients cleared before it, {_TIMES} updates in a row" if known.times else ""
            self.sink.number(type(args[0]).__name__, float(lost), kind=Value.KEPT, facts={"what": "lost", "seen": seen})
        self._over = sum(k.updates for k in self._known.values()) >= _UPDATES * len(self._known)  # one that never updates keeps nobody busy

    def _updated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._within = max(0, self._within - 1)
        for known in self._known.values():  # whatever another optimizer moved, the passes before it were for that
            known.lines, known.lost, known.given = [], [], []

    def _gradients(self, known: _Known) -> list[tuple[int, int]]:
        read = self.sink.gradients(known.held(_LOOKED_AT))
        self._over = self._over or read is None
        return [(id(grad), _version(grad)) for grad in read or () if grad is not None]

    def _line(self) -> str:
        """The user's line that asked for this pass; "" without one."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith("<") and not os.path.abspath(name).startswith(self._prefixes):
                return f"{os.path.basename(name)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # inference tensors have none
        return -1
