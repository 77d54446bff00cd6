"""Where a run is: whether recording has begun or is over, which step it is in, and what has happened in that step.

A step begins with the first training forward after an optimizer's step, or after gradients were cleared following a
backward pass: then nothing was updated (a scaler that skips). Where no optimizer has stepped and parameters were moved by
hand, that is a trial that comes before the update (sharpness-aware minimization); without any optimizer it is the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The state of one process.

    Attributes:
        begun: a training forward was seen.
        over: nothing is recorded any more.
        trial: a library tries modules out; that belongs to no step.
        step: the number of the step.
        stepped: an optimizer has stepped in it.
        backward: gradients were computed in it.
        cleared: … and cleared again.
        boundary: the forward that begins is that of the next step.
        stepping: optimizers whose step runs, by id: one that asks for gradients (LBFGS) calls the model within it.
    """

    begun: bool = False
    over: bool = False
    trial: bool = False
    step: int = 0
    stepped: bool = False
    backward: bool = False
    cleared: bool = False
    boundary: bool = False
    stepping: set[int] = field(default_factory=set)

    def recording(self) -> bool:
        """Whether the step is one that is recorded."""
        return self.begun and not self.over

    def complete(self) -> bool:
        """Whether the next training forward is that of another step."""
        return not self.stepping and (self.stepped or (self.backward and self.cleared))

    def advance(self) -> None:
        """Another step begins."""
        self.step += 1
        self.stepped = self.backward = self.cleared = False
