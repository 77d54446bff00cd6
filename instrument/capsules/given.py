"""What a step is given, and what it gives: batches of loaders, arguments and results of modules and loss functions.

`ring` passes on what the hooks see. Inputs are copied within the room of their step, results only fingerprinted; what does
not fit is absent, with the reason. Nothing of the user's is kept alive.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.capsules.held import Holder, is_plain, leaves
from proctor.instrument.capsules.rng import OF_PROGRAM, Reader
from proctor.instrument.capsules.step import Content, HeldCall, HeldStep, nbytes
from proctor.instrument.observe.plainly import is_tensor

MAX_CALLS: Final = 64  # of a step
MAX_BATCHES: Final = 64  # between two steps
AHEAD: Final = 4  # batches loaded before a step that it may use: some loops load ahead


class Given:
    """Batches and calls of one process.

    Args:
        room: bytes that the batches of a step may take, and as many its arguments.
    """

    def __init__(self, room: int) -> None:
        self.generators = Reader()
        self._holder = Holder()
        self._room = self._batch_room = room
        self.loaded = 0  # batches so far
        self._first: int | None = None
        self._batches: list[tuple[int, list[Content]]] = []

    def opens(self, step: HeldStep) -> None:
        """A step begins; it may use batches that were loaded before."""
        if self._first is None:
            self._first = self.loaded
        step.batches_before, step.room = self.loaded, self._room
        step.batches = [b for b in self._batches if b[0] >= self.loaded - AHEAD]
        self._batches = list(step.batches)
        self._batch_room = self._room
        self._holder.clear()

    @property
    def first_batch(self) -> int:
        """Batches that were loaded before the first training act."""
        return self._first or 0

    def batch(self, result: Any, current: HeldStep | None, wanted: bool = True) -> None:
        """A loader gives a batch; `wanted`: a step that is kept may use it."""
        number, self.loaded = self.loaded, self.loaded + 1
        if not wanted:
            return
        contents = self._contents(leaves(result), self._batch_room)
        self._batch_room -= nbytes(contents)
        self._batches = [*self._batches[-MAX_BATCHES + 1 :], (number, contents)]
        if len(self._batches) > AHEAD and (current is None or current.updates):
            # Between steps only those that the next one may use; their room is free again.
            self._batch_room += sum(nbytes(c) for _, c in self._batches[:-AHEAD])
            self._batches = self._batches[-AHEAD:]
        if current is not None and not current.updates:
            current.batches = [*current.batches[-MAX_BATCHES + 1 :], (number, contents)]

    def call(
        self, step: HeldStep, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, opens: bool = False
    ) -> None:
        """A module or a loss function is called in a step."""
        if len(step.calls) >= MAX_CALLS:
            step.lacks(f"more than {MAX_CALLS} calls: the later ones")
            return
        inputs = self._contents(leaves((*args, kwargs), names=True), step.room)
        step.room -= nbytes(inputs)
        drawn = [s for s in step.generators if s.name not in OF_PROGRAM] if opens else self.generators.read(everything=False)
        step.calls.append(HeldCall(what, name, inputs, drawn))

    def returned(self, step: HeldStep, what: str, result: Any) -> None:
        """That call gives this."""
        call = step.calls[-1] if step.calls else None
        if call is not None and call.what == what and not call.outputs:
            call.outputs = [(p, self._holder.observe(v) if is_tensor(v) else v) for p, v in leaves(result)[:32]]

    def backward(self, step: HeldStep, args: tuple[Any, ...]) -> None:
        """Gradients are asked for of these."""
        call = HeldCall("backward", "", [], [])
        if not step.skipped:
            call.outputs = [(p, self._holder.observe(v)) for p, v in leaves(args[0])[:8] if is_tensor(v)]
        step.calls.append(call)

    def _contents(self, found: list[tuple[str, Any]], room: int) -> list[Content]:
        contents: list[Content] = []
        for place, leaf in found:
            if is_tensor(leaf):
                held = self._holder.hold(leaf, room)
                room -= held.nbytes
                contents.append((place, held))
            else:
                contents.append((place, leaf if is_plain(leaf) else f"<{type(leaf).__name__}>"))
        return contents
