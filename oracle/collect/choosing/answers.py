"""What decisions ask of a recording (`decisions.Host`): where the program is, what the reference chose there, and to keep what was chosen."""

from __future__ import annotations

import torch

from proctor.oracle.collect.edges.crossings import Crossings
from proctor.oracle.collect.edges.forced import Supplied
from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.tape import Tape
from proctor.oracle.tensors import EVALUATION, Draw


class Answers:
    """Of one process.

    Args:
        progress: where the run is.
        tape: records.
        crossings: know which modules run.
        supplied: has the reference's choices and masks.
        guard: takes our errors.
    """

    def __init__(self, progress: Progress, tape: Tape, crossings: Crossings, supplied: Supplied, guard: RecordingGuard) -> None:
        self._progress, self._tape, self._crossings, self._supplied = progress, tape, crossings, supplied
        self.fail = guard.fail  # recording failed; the program goes on
        self.place = crossings.running.innermost
        self.keep = crossings.keep
        self.unseen = crossings.paused

    def recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._progress.recording() and not self._progress.trial and self._tape.running()

    def told(self, place: Place, kind: str, slot: str, own: torch.Tensor) -> torch.Tensor | None:
        """The reference's choice, or mask, in the place of a module's own."""
        choices = self._supplied.choices if not place.evaluation else None
        return choices(self._progress.step, kind, place.name, slot, place.call, own) if choices is not None else None

    def drawn(self, place: Place, slot: str, p: float, digest: str, shape: tuple[int, ...], begins: str) -> None:
        """Note that elements are dropped."""
        if self._tape.waits and not place.evaluation:
            return
        phase = EVALUATION if place.evaluation else ""
        self._tape.info.draws.append(Draw(self._progress.step, place.call, place.name, slot, p, digest, place.again, phase, shape, begins))
