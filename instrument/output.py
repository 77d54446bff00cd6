"""What leaves one process: rows, what is said of it in `process.json`, and the way to the verifier. Part of one observer.

`observer.arm` gives it to `record.writer`, whose thread asks for rows and facts. A full disk makes it sample steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proctor.errors import ProctorError
from proctor.instrument.budget import SAID_S
from proctor.instrument.guard import say, unsaid
from proctor.instrument.record.packages import packages
from proctor.invariants.redact import recorded
from proctor.invariants.schema import TRACE_SCHEMA, Name

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

MAX_UNSEEN: Final = 2_000  # names of functions that are told not to be observed
HOT_CALLS: Final = 20_000  # calls of one user function between two flushes that take it out of the trace


class Output:
    """Of one observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.notes: list[str] = []
        self.early_drops = self.early_values = 0  # records that were dropped before the process was armed
        self.sample_every = observer.config.every
        self.skipped = 0  # steps that were not recorded, besides those that a budget leaves out
        self._counted: dict[str, int] = {}
        self._counted_at = 0.0

    def sender(self, folder: Path) -> Any:
        """The way to the verifier, where there is one."""
        if not self._observer.config.stream:
            return None
        import platform

        from proctor.instrument.record.stream import Sender

        token = Path(self._observer.config.token_file or Path(self._observer.config.run) / "boot" / "token")
        try:
            sender = Sender(
                self._observer.config.stream,
                token,
                lambda: (folder.name, platform.node(), self._observer.writer.told(self.info())),
                self._observer.guard,
                on_freeze=self._observer.freeze,
            )
            sender.glances = None if self._observer.sentinel is None else self._observer.sentinel.take
            return sender
        except (ProctorError, OSError) as e:
            say(f"not streaming: {e}")
            return None

    def drain(self) -> dict[str, Any]:
        """Rows of all tables since the last time."""
        calls, states, values = self._observer.recorder.drain(), self._observer.tracker.take_rows(), self._observer.sink.take_rows()
        # Taken after the rows, because the program goes on meanwhile: what a row refers to is then among them.
        context = self._observer.contexts.take_rows()
        names = [(kind, i, recorded(text) if kind in (Name.SIGNATURE, Name.META) else text) for kind, i, text in self._observer.recorder.drain_names()]
        self._cool(calls)
        return {"names": names, "context": context, "calls": calls, "states": states, "values": values}

    def _cool(self, calls: dict[str, Any]) -> None:
        """Stop observing a user function that is called so often that it drowns the rest."""
        import numpy as np

        fn = np.asarray(calls["fn"])
        if len(fn) < HOT_CALLS:
            return
        codes, counts = np.unique(fn, return_counts=True)
        hot = {int(c) for c, n in zip(codes, counts) if n >= HOT_CALLS}
        for name in list(self._observer.user.names):
            if self._observer.intern(Name.FUNCTION, name) in hot and self._observer.user.drop(name):
                self._observer.unseen.append(name)
                self.notes.append(f"{name} is called too often; no longer observed")

    def info(self) -> dict[str, Any]:
        """`process.json`."""
        import torch

        return {
            "schema": TRACE_SCHEMA,
            "pid": os.getpid(),
            **self._observer.structure.facts(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "libraries": {
                name: str(getattr(sys.modules[name], "__version__", "")) for name in self._observer.taps.libraries if name in sys.modules
            },
            "dropped": self._observer.recorder.dropped - self.early_drops + self._observer.sink.dropped - self.early_values
            + (self._observer.writer.lost + self._observer.writer.torn if self._observer.writer is not None else 0),
            **self._left_out(),
            "notes": self._observer.guard.notes + self.notes + unsaid() + (self._observer.capsules.notes if self._observer.capsules is not None else []),
            "finished": self._observer.finished,
            "blind": [list(pair) for pair in self._observer.guard.ended],
            "unobserved": [*self._observer.unseen, *self._observer.user.left_alone][:MAX_UNSEEN],
            "definitions": dict(self._observer.user.definitions),
            "packages": packages(),
            **(self._observer.budget.facts(last=self._observer.finished) if self._observer.budget is not None else {}),
            **self._observer.probes.facts(),
        }

    def _left_out(self) -> dict[str, int]:
        """Steps that were counted and not recorded, where there are any. The numbers are as old as the last report: each new one is written and sent."""
        budget = self._observer.budget
        left_out = self.skipped + (budget.left_out if budget is not None else 0)
        now = time.monotonic()
        if left_out and (not self._counted or self._observer.finished or now - self._counted_at >= SAID_S):
            self._counted, self._counted_at = {"steps": self._observer.clock.step + 1, "left_out": left_out}, now
        return self._counted

    def went_blind(self) -> None:
        """An error of ours has switched something off: say so soon."""
        writer = self._observer.writer
        if writer is None:
            return
        writer.tell_soon()
        if self._observer.guard.disabled("writer"):
            writer.leave_word(self._observer.clock.step)

    def degrade(self, failing: bool) -> None:
        """The disk is full: sample ever more sparsely; back to normal when it is not."""
        self.sample_every = min(max(self.sample_every, 1) * 10, 10_000) if failing else self._observer.config.every
        if failing:
            self.notes.append("the trace could not be written for a while; steps were sampled")


def say_nothing(run: str) -> None:
    """The command ends, and neither it nor a process that it started has recorded anything."""
    recorded = Path(run) / "procs"
    if not recorded.is_dir() or not any(recorded.iterdir()):
        say("nothing was recorded: no optimizer of torch was made, and no parameter was seen to change after a backward")
