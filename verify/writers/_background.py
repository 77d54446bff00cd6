"""A writer behind a thread: a tool that is slow, or not reachable, must not hold up the verifier.

The thread opens the target too, since that may wait for the network. Calls are queued; when the queue is full the
newest is dropped and counted. The queue belongs to the thread that judges, everything of the library's to ours.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Final

from proctor.errors import ProctorError
from proctor.invariants.invariant import Severity
from proctor.verify.writers import Target, Writer, open_writer
from proctor.verify.writers._guarded import Guarded

QUEUED: Final = 2_000  # calls; about an hour of one curve point every two seconds
CLOSING_S: Final = 20.0  # what a tool gets to take what is queued when the job ends


class Background:
    """Writes in a thread of its own.

    Args:
        target: where to.
        run: how the run is called there.
        say: told once when the target cannot be opened or fails; called in the thread.
        opener: how to open it.
    """

    def __init__(
        self, target: Target, run: str, say: Callable[[str], None], opener: Callable[[Target, str], Writer] = open_writer
    ) -> None:
        self.dropped = 0
        self._target, self._run, self._say, self._opener = target, run, say, opener
        self._queue: queue.Queue[Callable[[Writer], None] | None] = queue.Queue(QUEUED)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"proctor-{target.kind}", daemon=True)
        self._thread.start()

    def series(self, step: int, values: Mapping[str, float]) -> None:
        points = dict(values)
        self._put(lambda writer: writer.series(step, points))

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        self._put(lambda writer: writer.incident(step, title, text, severity))

    def close(self) -> None:
        """Wait for what is queued, `CLOSING_S` seconds at most."""
        self._ended.set()
        self._put(None)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            self._say(f"{self._target.kind} did not take all of its records in {CLOSING_S:g} s")

    def _put(self, call: Callable[[Writer], None] | None) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.dropped += call is not None

    def _work(self) -> None:
        try:
            writer = Guarded(self._target.kind, self._opener(self._target, self._run), self._say)
        except ProctorError as error:
            self._say(str(error))
            self._drain()
            return
        while True:
            try:
                call = self._queue.get(timeout=1.0)
            except queue.Empty:
                if self._ended.is_set():  # the queue was full when it ended
                    break
                continue
            if call is None:
                break
            call(writer)
        writer.close()

    def _drain(self) -> None:
        """Nobody writes: keep the queue from filling up."""
        while not self._ended.is_set():
            try:
                if self._queue.get(timeout=1.0) is None:
                    return
            except queue.Empty:
                continue
