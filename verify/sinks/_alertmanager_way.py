"""Whether a test alert reached people: what an Alertmanager did with it after it had taken it.

Alertmanager takes an alert at once and tells people when its group has waited (`group_wait`, 30 s where nothing is said). An alert that
ends before that is told to nobody, so a test has to stay until then. Who gets it, and whether a silence holds it back, the API tells
(`/api/v2/alerts`); that something was sent, the counters (`/metrics`). These count all alerts: on an Alertmanager that is busy,
another alert's notification may be taken for ours. `notifications_total` goes up before anything is sent, and `notifications_failed_total` when Alertmanager
has given up, minutes later: what a receiver took or refused is in `notification_requests_total` and `_failed_total`, which count each attempt when it is over.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from proctor.errors import DeliveryError
from proctor.verify.sinks._http import HttpConfig, fetch
from proctor.verify.wording import clean

_GROUP_WAIT_S: Final = 30.0  # Alertmanager's default
_MORE_S: Final = 10.0  # beyond the longest wait of a group, until nobody was told
_LONGEST_S: Final = 600.0
_POLL_S: Final = 0.25
_WAIT: Final = re.compile(r"^\s*group_wait:\s*(\S+)\s*$", re.MULTILINE)
_SPAN: Final = re.compile(r"(\d{1,9})(ms|s|m|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTER: Final = re.compile(r"^alertmanager_notification(s|_requests)_(failed_)?total\{[^}]*\} (\S+)$", re.MULTILINE)


class Way:
    """Follows one alert through one Alertmanager; made before the alert is sent.

    Args:
        url: of the Alertmanager, without `/api/v2`.
        config: TLS and patience of requests.
        headers: that let us in.
        clock, sleep: for tests.
    """

    def __init__(
        self,
        url: str,
        config: HttpConfig,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url, self._config, self._headers, self._clock, self._sleep = url.rstrip("/"), config, headers, clock, sleep
        self._begin = clock()
        self._sent, self._failed = self._counters()
        self._site = _site(self._get("/api/v2/status"))

    def told(self, key: str) -> str:
        """Wait until somebody must have been told of the alert, and say who.

        Args:
            key: label `key` of the alert.

        Raises:
            DeliveryError: nobody is told, and why.
        """
        wait_s = min(_LONGEST_S, max((_seconds(text) for text in _WAIT.findall(self._site)), default=_GROUP_WAIT_S))
        receivers = self._receivers(key)
        idle = [name for name in receivers if not _tells(name, self._site)]
        if receivers and idle == receivers:
            raise DeliveryError(
                f"it is routed to the receiver {', '.join(map(repr, idle))}, which tells nobody", hint="look at the routes of the Alertmanager"
            )
        who = f"receiver {', '.join(clean(name, 60) for name in receivers)}" if receivers else "its receivers"
        if self._sent is None:
            self._sleep(max(0.0, wait_s + 1.0 - (self._clock() - self._begin)))
            return f"{who} after {wait_s:.0f} s (not seen: /metrics does not answer)"
        while self._clock() - self._begin < wait_s + _MORE_S:
            sent, failed = self._counters()
            if sent is not None and failed > self._failed:
                raise DeliveryError(f"Alertmanager could not tell {who}", hint="its log says why")
            if sent is not None and sent - failed > self._sent - self._failed:
                return f"{who} told after {self._clock() - self._begin:.1f} s"
            self._receivers(key)  # somebody may silence it meanwhile
            self._sleep(_POLL_S)
        raise DeliveryError(
            f"Alertmanager told nobody within {wait_s + _MORE_S:.0f} s",
            hint="an alert that joins an open group waits for group_interval: group_by should hold `key`",
        )

    def _receivers(self, key: str) -> list[str]:
        """Who the alert goes to; none while that is not known. Raises `DeliveryError` when it is held back."""
        asked = urllib.parse.urlencode({"filter": f'key="{key}"'})
        try:
            alerts = msgspec.json.decode(self._get(f"/api/v2/alerts?{asked}") or "[]", type=list[dict[str, Any]])
            names = [str(r["name"]) for alert in alerts for r in alert["receivers"]]
            status = alerts[0]["status"] if alerts else {}
            held = [*status.get("silencedBy", ()), *status.get("inhibitedBy", ())]
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            return []
        if status.get("state") == "suppressed":
            why = "a silence" if status.get("silencedBy") else "an inhibition"
            raise DeliveryError(f"{why} of the Alertmanager holds it back, so nobody is told ({clean(', '.join(map(str, held)), 80)})")
        return sorted(set(names))

    def _counters(self) -> tuple[float | None, float]:
        """Attempts that are over, and those of them that failed, so far; of an Alertmanager before 0.22 notifications; `None` where neither is told."""
        found = _COUNTER.findall(self._get("/metrics") or "")
        attempts = [(failed, n) for what, failed, n in found if what == "_requests"] or [(failed, n) for _, failed, n in found]
        if not attempts:
            return None, 0.0
        return sum(float(n) for failed, n in attempts if not failed), sum(float(n) for failed, n in attempts if failed)

    def _get(self, path: str) -> str | None:
        return fetch(self._url + path, self._config, headers=self._headers)


def _site(status: str | None) -> str:
    """The configuration as Alertmanager itself writes it, in YAML."""
    try:
        said = msgspec.json.decode(status or "{}")
        return str(said["config"]["original"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return ""


def _tells(receiver: str, site: str) -> bool:
    """Whether a receiver has anything that sends; `True` where that is not known."""
    _, _, below = site.partition("\nreceivers:\n")
    blocks = re.split(r"^- name: ", below, flags=re.MULTILINE)[1:]
    block = next((b for b in blocks if b.splitlines()[:1] and b.splitlines()[0].strip("'\" ") == receiver), None)
    return block is None or "_configs:" in block


def _seconds(span: str) -> float:
    return sum(int(n) * _SECONDS[unit] for n, unit in _SPAN.findall(span))
