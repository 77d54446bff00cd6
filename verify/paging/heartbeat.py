"""Signs of life: they stop when the verifier stops judging, so that a silent monitor is noticed elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from proctor.errors import DeliveryError
from proctor.invariants.invariant import Severity, Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.paging.config import Heartbeat as HeartbeatConfig
from proctor.verify.sinks import Delivery, Secret, Sink
from proctor.verify.sinks._http import HttpConfig, post

STALE_FACTOR: Final = 2.0  # a verifier that did not say `alive` for so many intervals counts as stuck


class Heartbeat:
    """Sends a sign of life every interval, as long as `alive` is called.

    Args:
        config: where and how often.
        sinks: by name.
        job: what the alert is called by.
        say: told once about each trouble.
        now: epoch seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: HeartbeatConfig,
        sinks: Mapping[str, Sink],
        job: str,
        *,
        say: Callable[[str], None] = lambda text: None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._sinks, self._job, self._say = config, sinks, job, say
        self._now, self._clock = now, clock
        self._began, self._heard, self._text = now(), clock(), ""
        self._trouble, self.sent = "", 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def alive(self, text: str = "") -> None:
        """The verifier judges; `text` says how far it is. Cheap enough for every step."""
        self._heard, self._text = self._clock(), text

    def start(self) -> None:
        """Begin to beat in a thread."""
        self._thread = threading.Thread(target=self._run, name="proctor-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, *, finished: bool, timeout_s: float) -> None:
        """Stop; after a job that `finished` nobody is to miss the signs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if finished:
            self._send(self._end)

    def beat(self) -> bool:
        """Send one sign of life unless the verifier is stuck; whether it was taken everywhere."""
        if self._clock() - self._heard > max(STALE_FACTOR * self._config.interval_s, 10.0):
            return False
        done = self._send(self._sign)
        self.sent += done
        return done

    def _run(self) -> None:
        while not self._stop.is_set():
            self.beat()
            self._stop.wait(self._config.interval_s)

    def _send(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except (DeliveryError, ValueError) as error:
            text = error.message if isinstance(error, DeliveryError) else str(error)
            if text != self._trouble:
                self._trouble = text
                self._say(f"heartbeat: {text}; it is tried again")
            return False
        if self._trouble:
            self._trouble = ""
            self._say("heartbeat: works again")
        return True

    def _sign(self) -> None:
        if self._config.sink:
            sink = self._sinks[self._config.sink]
            sink.alive(self._delivery(Action.TRIGGER), self._config.interval_s)
        if self._config.url is not None:
            self._get(self._config.url)

    def _end(self) -> None:
        if self._config.sink:
            self._sinks[self._config.sink].alive(self._delivery(Action.RESOLVE), self._config.interval_s)
        if self._config.end_url is not None:
            self._get(self._config.end_url)

    def _get(self, secret: Secret) -> None:
        config = self._config
        http = HttpConfig(
            type="heartbeat", timeout_s=config.timeout_s, allow_http=config.allow_http, ca_file=config.ca_file
        )
        post(secret.read(), None, http)

    def _delivery(self, action: Action) -> Delivery:
        now = self._now()
        notice = Notice(
            action=action,
            key=f"proctor:{self._job or 'job'}:alive",
            tier=Tier.TICKET,
            severity=Severity.INFO,
            title="Proctor watches this job; page when this alert is missing",
            text=self._text,
            job=self._job,
            began=self._began,
            at=now,
        )
        return Delivery(notice=notice, event_id="alive", at=now)
