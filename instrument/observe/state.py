"""The state of models and optimizers: fingerprinted at boundaries, recorded when it changed.

`steps` asks for a look around each act that may change something; `tracked` says what there is to look at. Out: rows of the
`states` table, one for each value that changed since its last row.

What is hashed when: a tensor's `_version` and address are a *hint* that it did not change; the hint is wrong for
fused optimizers, `p.data` writes, gloo collectives and batch-norm statistics (findings/native.md §2). So data is hashed
without the hint after every update, gradients after every backward, buffers before every update, and the hint
serves only the boundaries between. A write that escapes version counters is therefore seen at the end of the next update; before
the first updates, and some later ones, data is hashed as well, so that such a write is told from that update.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from proctor.instrument.observe.content import reader
from proctor.instrument.observe.fingerprint import Summary, fingerprint_all
from proctor.instrument.observe.seen import Seen
from proctor.instrument.observe.tracked import Slot, Tracked
from proctor.instrument.record.rows import take
from proctor.invariants.schema import StateFlag

_NO_VALUE = Summary(0, 0.0, int(StateFlag.NONE))


class Look(IntEnum):
    """How a boundary looks at a kind of value."""

    SKIP = 0
    HINT = 1  # hash where the version counter or the address moved
    FORCE = 2  # hash all


class StateTracker(Tracked):
    """Looks at what is tracked; appends rows of the `states` table to `rows`."""

    def __init__(self, intern: Callable[[int, str], int], watches: Callable[[str], bool]) -> None:
        super().__init__(intern, watches)
        self.rows: list[tuple[Any, ...]] = []
        self.dirty = False  # a collective may have written without a version bump
        self._values: dict[int, int] = {}  # fingerprints that `moved` found, by id of the parameter
        self._slots_at = -1  # the layout of `_slots`
        self._slots: tuple[list[Slot], list[Slot]] = ([], [])  # data and gradients of all parameters

    # -- boundaries ---------------------------------------------------------------------------------------

    def observe(
        self, seq: int, call: int, edge: int, context: Callable[[], int], *,
        data: Look = Look.SKIP, grad: Look = Look.SKIP, buffers: Look = Look.SKIP, optimizer: Look = Look.SKIP, silent: bool = False,
    ) -> None:
        """Look at the tracked values and append a row for each that changed since its last row.

        `context`: gives the code of the present one, where there is something to say. `silent`: no rows; what changed while steps were left out was changed by nobody knows whom.
        """
        work: list[tuple[Slot, Any]] = []
        if data and self.watches("data"):
            if self.dirty:
                data = Look.FORCE
            self._collect(work, self._parameter_slots()[0], data)
        if grad and self.watches("grad"):
            if self.dirty:
                grad = Look.FORCE
            self._collect(work, self._parameter_slots()[1], grad)
        if data and grad:
            self.dirty = False
        if buffers and self._buffers:
            self._collect(work, list(self._buffers.values()), buffers)
        if optimizer and self.watches("optimizer"):
            self._collect(work, list(self._state_slots()), optimizer)
        if not work:
            return
        hashed = [value for _, value in work if value is not None]
        summaries = iter(fingerprint_all(hashed)) if hashed else iter(())
        ctx = context()
        rows = [] if silent else self.rows
        fps, norms, marks = self._last.fps, self._last.norms, self._last.flags
        self._seen = None
        for slot, value in work:
            fp, norm, flags = _NO_VALUE if value is None else next(summaries)
            state = (fp, flags, slot.meta)
            if state == slot.last:
                continue
            slot.last = state
            fps[slot.at], norms[slot.at], marks[slot.at] = fp, norm, flags
            rows.append((seq, call, edge, ctx, slot.var, slot.meta, fp, norm, flags))
            for twin in slot.twins:
                rows.append((seq, call, edge, ctx, twin, slot.meta, fp, norm, flags))

    def see_optimizers(self) -> None:
        """Look at the state of optimizers for `seen_last` only, without rows."""
        work: list[tuple[Slot, Any]] = []
        self._collect(work, list(self._state_slots()), Look.FORCE)
        fps, norms, marks = self._last.fps, self._last.norms, self._last.flags
        for (slot, _), (fp, norm, flags) in zip(work, fingerprint_all([value for _, value in work]), strict=True):
            fps[slot.at], norms[slot.at], marks[slot.at] = fp, norm, flags
        self._seen = None

    def _parameter_slots(self) -> tuple[list[Slot], list[Slot]]:
        if self._slots_at != self.layout:
            entries = self._params.values()
            self._slots, self._slots_at = ([entry[1] for entry in entries], [entry[2] for entry in entries]), self.layout
        return self._slots

    @staticmethod
    def _collect(work: list[tuple[Slot, Any]], slots: list[Slot], look: Look) -> None:
        """Add the slots that have to be hashed, and what they hold."""
        reader().collect(work, slots, look is Look.FORCE)

    def wrote_data(self) -> bool:
        """Whether a parameter was written since its last look, by its version counter; nothing is hashed."""
        parameters = ((data.owner(), data.version) for _, data, _, _ in self._params.values())
        return any(p is not None and not p.is_inference() and p._version != version for p, version in parameters)

    def take_rows(self) -> list[tuple[Any, ...]]:
        return take(self.rows)

    # -- for capsules -------------------------------------------------------------------------------------

    def seen_last(self) -> Seen:
        """The fingerprint, flags and norm that each tracked value had when it was last looked at.

        Parameters and gradients go by the id of the parameter, buffers by that of their module and their name in it,
        optimizer state by the id of the parameter and its key; in order of discovery.
        """
        if self._seen is None:
            if self._places is None:
                entries = list(self._params.values())
                self._places = {
                    "parameter": (list(self._params), [entry[1].at for entry in entries]),
                    "gradient": (list(self._params), [entry[2].at for entry in entries]),
                    "buffer": (list(self._buffers), [slot.at for slot in self._buffers.values()]),
                    "optimizer": (list(self._optimizer_slots), [slot.at for slot in self._optimizer_slots.values()]),
                }
            self._seen = self._last.now(self._places)
        return self._seen

    def moved(self) -> bool:
        """Whether a parameter has another value than when this was last asked; all are hashed."""
        alive = self.parameters()
        now = {key: summary.fp for (key, _), summary in zip(alive, fingerprint_all([p for _, p in alive]), strict=True)}
        before, self._values = self._values, now
        return any(before.get(key, fp) != fp for key, fp in now.items())
