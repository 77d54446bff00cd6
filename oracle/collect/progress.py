"""Where a recording is: whether it has begun or is over, which step it is in, and what has happened in that step.

What a step is says the clock of `instrument/steps`, which `acts.py` tells what the program does. The recording follows it a little
later: the clock counts a step when its first forward begins, and the recording goes on to it behind the program's own hooks of
that forward, which may gather parameters that late.
"""

from __future__ import annotations

from proctor.instrument.steps.clock import StepClock


class Progress:
    """The state of one process.

    Attributes:
        clock: says when a step is over.
        begun: a training forward was seen.
        over: nothing is recorded any more.
        trial: a library tries modules out; that belongs to no step.
        step: the number of the step that is recorded.
        stepped: an optimizer has stepped in it, or parameters were moved by hand.
        boundary: the clock has gone on, the recording has not yet.
        stepping: optimizers whose step runs, by id, the innermost last: one that asks for gradients (LBFGS) calls the model within it.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        self.clock.on_new_step = self._goes_on
        self.begun = self.over = self.trial = False
        self.step = 0
        self.stepped = self.boundary = False
        self.stepping: list[int] = []

    def _goes_on(self) -> None:
        self.boundary = self.begun

    def recording(self) -> bool:
        """Whether the step is one that is recorded."""
        return self.begun and not self.over

    def advance(self) -> None:
        """Another step begins."""
        self.step += 1
        self.stepped = self.boundary = False
