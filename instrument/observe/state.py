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

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from proctor.instrument.observe.content import reader, torch_function_off
from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.instrument.observe.plainly import transforming
from proctor.instrument.observe.refs import by_values
from proctor.instrument.observe.seen import Seen
from proctor.instrument.observe.tracked import Tracked
from proctor.instrument.record.rows import take
from proctor.native import Slot, look


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
        self._watched = {kind: watches(kind) for kind in ("data", "grad", "optimizer")}
        self.dirty = False  # a collective may have written without a version bump
        self._values: dict[int, int] = {}  # fingerprints that `moved` found, by id of the parameter
        self._slots_at = -1  # the layout of `_slots`
        self._slots: tuple[list[Slot], list[Slot]] = ([], [])  # data and gradients of all parameters

    # -- boundaries ---------------------------------------------------------------------------------------

    def observe(
        self, seq: int, call: int, edge: int, context: Callable[[], int],
        data: Look = Look.SKIP, grad: Look = Look.SKIP, buffers: Look = Look.SKIP, optimizer: Look = Look.SKIP, silent: bool = False,
        of: Sequence[int] | None = None,
    ) -> None:
        """Look at the tracked values and append a row for each that changed since its last row.

        `context`: gives the code of the present one, where there is something to say. `silent`: no rows; what changed while steps were left out was changed by nobody knows whom.
        `of`: ids of parameters whose gradients are looked at, and no others.
        Within a transform of `torch.func` nothing is looked at: what stands in for parameters there has no memory.
        """
        if transforming():
            return
        if self._slots_at != self.layout:
            entries = self._params.values()
            self._slots, self._slots_at = ([entry[1] for entry in entries], [entry[2] for entry in entries]), self.layout
        groups: list[tuple[list[Slot], bool]] = []
        if data and self._watched["data"]:
            groups.append((self._slots[0], self.dirty or data is Look.FORCE))
        if grad and self._watched["grad"]:
            grads = self._slots[1] if of is None else [self._params[key][2] for key in of if key in self._params]
            groups.append((grads, self.dirty or grad is Look.FORCE))
        if data and grad:
            self.dirty = False
        if buffers and self._buffers:
            groups.append((list(self._buffers.values()), buffers is Look.FORCE))
        if optimizer and self._watched["optimizer"]:
            groups.append((self._state_slots(), optimizer is Look.FORCE))
        with torch_function_off()():
            rows, where = None if silent else self.rows, (seq, call, edge)
            try:
                any_seen = look(reader(), groups, self._last.columns, True, rows, where, context, fingerprint_all)
            except RuntimeError:  # of what has no memory as one block, before a row is there
                if not self._mark_sparse():
                    raise
                data, grad, buffers, optimizer = (Look.FORCE if kind else Look.SKIP for kind in (data, grad, buffers, optimizer))
                self.observe(seq, call, edge, context, data, grad, buffers, optimizer, silent, of)
                return
            if any_seen:
                self._seen = None

    def _mark_sparse(self) -> bool:
        """Look at gradients that are sparse by their values from now on; whether there are any that were not known."""
        found = {key: slot for key, (ref, _, grad, _) in self._params.items() if (slot := by_values(ref(), ref, grad)) is not None}
        for key, slot in found.items():
            self._params[key] = (*self._params[key][:2], slot, self._params[key][3])
        self._changed()
        return bool(found)

    def see_optimizers(self) -> None:
        """Look at the state of optimizers for `seen_last` only, without rows."""
        if transforming():
            return
        with torch_function_off()():
            look(reader(), [(self._state_slots(), True)], self._last.columns, False, None, (0, 0, 0), int, fingerprint_all)
        self._seen = None

    def _state_slots(self) -> list[Slot]:
        return self._states.present([optimizer for _, optimizer in self.optimizers()], self.layout)

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
                    "optimizer": (list(self._states.slots), [slot.at for slot in self._states.slots.values()]),
                }
            self._seen = self._last.now(self._places)
        return self._seen

    def moved(self) -> bool:
        """Whether a parameter has another value than when this was last asked; all are hashed."""
        alive = self.parameters()
        now = {key: summary.fp for (key, _), summary in zip(alive, fingerprint_all([p for _, p in alive]), strict=True)}
        before, self._values = self._values, now
        return any(before.get(key, fp) != fp for key, fp in now.items())
