"""Takes what is due from the outbox to one sink, at the pace that it allows, and never gives up on a receiver that is down.

One thread a sink, so that a receiver that hangs delays no other. Of several processes that open an outbox one sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from proctor.errors import DeliveryError, OutboxError
from proctor.verify.paging.outbox import Message, Outbox
from proctor.verify.sinks import Sink
from proctor.verify.wording import clean

POLL_S: Final = 1.0  # another process may have queued something
_LONGEST_PAUSE_S: Final = 300.0


class Sender:
    """Sends to one sink.

    Args:
        sink: the receiver.
        outbox: what is due.
        may_send: whether this process is the one that sends.
        say: told once about each new trouble, and when it is over.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sink: Sink,
        outbox: Outbox,
        *,
        may_send: Callable[[], bool] = lambda: True,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink, self._outbox, self._may_send, self._say, self._clock = sink, outbox, may_send, say, clock
        self._not_before = 0.0  # monotonic: the pace, and the rest that a receiver in trouble gets
        self._failures = 0
        self._trouble = ""
        self._left_out = ""  # what was said of it
        self._unmarked: Message | None = None  # taken by the receiver, but the outbox could not be told
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def trouble(self) -> str:
        """What keeps it from sending, "" when nothing does."""
        return self._trouble

    def start(self) -> None:
        """Begin to send in a thread."""
        self._thread = threading.Thread(target=self._run, name=f"proctor-page-{self.sink.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something may be due."""
        self._wake.set()

    def retry_now(self) -> None:
        """Do not wait any longer for a receiver in trouble."""
        if self._failures:
            self._not_before, self._failures = 0.0, 0
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the request that is going on; False when that does not return in time."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def step(self) -> float:
        """Do at most one request; returns the seconds until there may be more to do."""
        try:
            return self._step()
        except OutboxError as error:
            self._complain(error.message)
            return POLL_S

    def outlive(self) -> None:
        """Tell what is not over once more, with an end far ahead, since nobody tells it again after this process."""
        if not self.sink.resend_s:
            return
        for _ in range(500):
            delivery = self._outbox.resend(self.sink)
            if delivery is None:
                return
            try:
                self.sink.send(msgspec.structs.replace(delivery, outlives=True))
            except DeliveryError as error:
                self._complain(error.message)
                return
            self._outbox.resent(self.sink, delivery.notice.key, 3600.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wait = self.step()
            except Exception as error:  # noqa: BLE001  a sink's own mistake must not end the paging
                self._complain(f"internal error: {type(error).__name__}")
                wait = 10.0
            if wait > 0:
                self._wake.wait(wait)
                self._wake.clear()

    def _step(self) -> float:
        if not self._may_send():
            return POLL_S
        if self._unmarked is not None:
            self._outbox.sent(self.sink, self._unmarked)
            self._unmarked = None
        rest = self._not_before - self._clock()
        if rest > 0:
            return min(rest, POLL_S)
        message = self._outbox.due(self.sink)
        if message is not None:
            if self._outbox.begin(message):
                self._attempt(message)
            return 0.0
        if self.sink.resend_s:
            delivery = self._outbox.resend(self.sink)
            if delivery is not None:
                try:
                    self.sink.send(delivery)
                except DeliveryError as error:
                    self._pause(error)
                    return POLL_S
                self._recovered()
                self._outbox.resent(self.sink, delivery.notice.key, self.sink.resend_s)
                return 0.0
        return self._outbox.wait_s(self.sink, POLL_S)

    def _attempt(self, message: Message) -> None:
        try:
            self.sink.send(message.delivery)
        except DeliveryError as error:
            if not error.retry:
                self._outbox.dead(self.sink, message, error.message)
                self._say(f"{self.sink.name}: a notice is lost: {error.message}  →  proctor page status")
                return
            self._outbox.failed(
                self.sink, message, error.message, unsure=error.unsure, retry_after_s=error.retry_after_s
            )
            self._pause(error)
            return
        except Exception as error:  # a payload that the sink cannot build would be tried for ever
            self._outbox.dead(self.sink, message, f"internal error: {type(error).__name__}: {clean(error, 120)}")
            raise
        if self.sink.left_out != self._left_out:
            self._left_out = self.sink.left_out
            self._say(f"{self.sink.name}: {self._left_out}; the others are told" if self._left_out else f"{self.sink.name}: everybody is told again")
        self._unmarked = message
        self._not_before = self._clock() + self.sink.interval_s
        self._outbox.sent(self.sink, message)
        self._unmarked = None
        self._recovered()

    def _pause(self, error: DeliveryError) -> None:
        self._failures += 1
        pause = min(_LONGEST_PAUSE_S, 2.0 ** min(self._failures - 1, 10)) * 0.5
        if error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s)
        self._not_before = self._clock() + max(pause, self.sink.interval_s)
        self._complain(error.message)

    def _complain(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._say(f"{self.sink.name}: {text}; it is tried again")

    def _recovered(self) -> None:
        self._failures = 0
        if self._trouble:
            self._trouble = ""
            self._say(f"{self.sink.name}: works again")
            self._outbox.answered(self.sink)
