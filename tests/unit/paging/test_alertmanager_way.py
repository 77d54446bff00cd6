"""Whether people were told is read off what their receivers took, not off what Alertmanager began."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proctor.errors import DeliveryError
from proctor.verify.sinks import _alertmanager_way as way
from proctor.verify.sinks._http import HttpConfig


class Counters:
    """`/metrics` of an Alertmanager whose counters go up as time passes: lists of (second, name)."""

    def __init__(self, clock: Callable[[], float], *events: tuple[float, str], known: tuple[str, ...] = ("notifications", "notification_requests")) -> None:
        self.clock, self.events, self.known = clock, events, known

    def get(self, address: str, *_: object, **__: object) -> str | None:
        if not address.endswith("/metrics"):
            return None
        count = lambda name: sum(n == name and self.clock() >= 100.0 + t for t, n in self.events)  # noqa: E731
        return "".join(f'alertmanager_{k}_{f}total{{integration="webhook"}} {count(f"{k}_{f}")}\n' for k in self.known for f in ("", "failed_"))


def told(monkeypatch: pytest.MonkeyPatch, *events: tuple[float, str], **how: tuple[str, ...]) -> str:
    now = [100.0]
    clock = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(way, "fetch", Counters(clock, *events, **how).get)
    found = way.Way("http://127.0.0.1:9093", HttpConfig(type="alertmanager"), {}, clock, lambda s: now.__setitem__(0, now[0] + s))
    return found.told("key")


def test_a_receiver_that_took_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "told after 31." in told(monkeypatch, (30.0, "notifications_"), (31.0, "notification_requests_"))


def test_a_receiver_that_cannot_be_reached_is_not_told_though_the_notification_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeliveryError, match="could not tell"):
        told(monkeypatch, (30.0, "notifications_"), (33.0, "notification_requests_"), (33.0, "notification_requests_failed_"))
    with pytest.raises(DeliveryError, match="told nobody"):
        told(monkeypatch, (30.0, "notifications_"))  # it hangs


def test_an_old_alertmanager_has_other_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "told after" in told(monkeypatch, (30.0, "notifications_"), known=("notifications",))
