"""One step as it is kept in memory."""

from __future__ import annotations

from time import monotonic  # our own: a program may put another clock into `time`
from typing import Any

from proctor.instrument.capsules.held import Held
from proctor.instrument.capsules.rng import RngState
from proctor.instrument.capsules.state import StateValues
from proctor.instrument.observe.seen import Seen

Content = tuple[str, Any]  # place, and a `Held` or a plain value


class HeldCall:
    """One call of a step."""

    __slots__ = ("generators", "inputs", "name", "outputs", "what")

    def __init__(self, what: str, name: str, inputs: list[Content], generators: list[RngState]) -> None:
        self.what, self.name, self.inputs, self.generators = what, name, inputs, generators
        self.outputs: list[Content] = []


class HeldStep:
    """One step. Filled by the training thread; the writer's thread only reads it."""

    __slots__ = (
        "absent", "after", "batches", "batches_before", "before", "calls", "complete", "event", "frozen", "generators",
        "gradients", "names", "nbytes", "opened_at", "room", "skipped", "step", "updated_at", "updates", "values", "why_not",
    )  # fmt: skip

    def __init__(self, step: int) -> None:
        self.step = step
        self.values: StateValues | None = None
        self.gradients: StateValues | None = None  # before the first backward
        self.why_not = ""  # no values
        self.skipped = False  # no values because of what they cost
        self.opened_at = monotonic()
        self.nbytes = 0
        self.event: Any = None  # after which copies on a device are there
        self.names: dict[Any, str] = {}
        self.before: Seen | None = None
        self.after: Seen | None = None
        self.generators: list[RngState] = []
        self.calls: list[HeldCall] = []
        self.batches: list[tuple[int, list[Content]]] = []
        self.batches_before = 0
        self.absent: list[str] = []
        self.updates = 0
        self.updated_at = 0.0  # monotonic, s
        self.complete = False
        self.frozen = False  # the writer reads it: its memory must not be used again
        self.room = 0  # bytes that its inputs may yet take

    def lacks(self, what: str) -> None:
        if what not in self.absent and len(self.absent) < 100:
            self.absent.append(what)


def nbytes(contents: list[Content]) -> int:
    """Of the copies among them."""
    return sum(c.nbytes for _, c in contents if isinstance(c, Held))
