from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.live.pages import Clock, FakeSink, notice, step
from helpers.live.receivers import Webhook, wait_until

from proctor.errors import DeliveryError
from proctor.verify.notice import Action
from proctor.verify.paging.config import Heartbeat, PageConfig
from proctor.verify.paging.pager import Pager
from proctor.verify.sinks import Delivery, Secret

Make = Callable[..., Pager]


class Resending(FakeSink):
    """Wants to hear of what fires again and again, as Alertmanager does."""

    resend_s = 60.0
    resend_resolved_s = 300.0  # type: ignore[misc]


def test_the_pace_of_a_receiver_is_kept(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    sink.interval_s = 1.0
    pager = pager_of(sink)
    pager.notify(notice("k:1"))
    pager.notify(notice("k:2"))
    step(pager)
    assert len(sink.got) == 1
    clock.now += 1.0
    step(pager)
    assert len(sink.got) == 2


def test_a_receiver_that_is_down_is_asked_by_one_message_at_a_time_and_all_go_when_it_is_up(pager_of: Make, clock: Clock, said: list[str]) -> None:
    sink = FakeSink()
    sink.down = DeliveryError("cannot be reached")
    pager = pager_of(sink)
    for i in range(5):
        pager.notify(notice(f"k:{i}"))
    for _ in range(100):
        step(pager)
        clock.now += 1.0
    assert sink.tries < 12
    sink.down = None
    clock.now += 300
    step(pager)
    assert len(sink.got) == 5
    assert said == ["fake: cannot be reached; it is tried again", "fake: works again"]


def test_retry_after_stops_all_messages_to_that_receiver(pager_of: Make, clock: Clock) -> None:
    sink, other = FakeSink("busy"), FakeSink("free")
    sink.down = DeliveryError("429", retry_after_s=120.0)
    pager = pager_of(sink, other)
    pager.notify(notice("k:1"))
    step(pager)
    sink.down = None
    pager.notify(notice("k:2"))
    clock.now += 100
    step(pager)
    assert sink.tries == 1 and len(other.got) == 2
    clock.now += 21
    step(pager)
    assert len(sink.got) == 2


def test_a_firing_incident_is_told_again_and_an_ended_one_for_five_minutes(pager_of: Make, clock: Clock) -> None:
    sink = Resending()
    pager = pager_of(sink)
    pager.notify(notice())
    for _ in range(10):
        step(pager)
        clock.now += 30
    assert [a for a, _ in sink.told] == ["trigger"] * 5
    pager.notify(notice(action="resolve"))
    for _ in range(60):
        step(pager)
        clock.now += 30
    ends = [d for d in sink.got if d.notice.action is Action.RESOLVE]
    assert 4 <= len(ends) <= 6 and len({d.at for d in ends}) <= 2, "with the moment at which it ended"


def test_re_sending_goes_on_after_a_restart(pager_of: Make, clock: Clock) -> None:
    first, second = Resending(), Resending()
    pager = pager_of(first)
    pager.notify(notice())
    step(pager)
    pager.close(0)
    clock.now += 61
    again = pager_of(second)
    step(again)
    assert second.told == [("trigger", "proctor:job:r1:dp")]


def test_a_sink_that_breaks_loses_its_own_message_only(pager_of: Make, said: list[str]) -> None:
    class Broken(FakeSink):
        def send(self, delivery: Delivery) -> None:
            raise ZeroDivisionError

    other = FakeSink("other")
    pager = pager_of(Broken("broken"), other)
    pager.notify(notice())
    with pytest.raises(ZeroDivisionError):
        step(pager)
    step(pager)
    assert len(other.got) == 1 and pager.status().sinks["broken"].waiting == 0


def test_a_planned_change_is_told_to_receivers_that_know_changes(pager_of: Make) -> None:
    changes: list[str] = []

    class Knows(FakeSink):
        def change(self, summary: str, at: float, source: str) -> None:
            changes.append(summary)

    pager = pager_of(Knows("a"), FakeSink("b"))
    pager.changed("restarted from step 4000")
    step(pager)
    assert changes == ["restarted from step 4000"]


def test_with_threads_a_page_leaves_at_once_and_a_hanging_receiver_delays_nobody(tmp_path: Path) -> None:
    class Hanging(FakeSink):
        def send(self, delivery: Delivery) -> None:
            time.sleep(1.0)
            raise DeliveryError("hangs", unsure=True)

    good = FakeSink("good")
    pager = Pager(PageConfig(), tmp_path / "o.db", sinks=[Hanging("bad"), good])
    pager.start()
    begin = time.monotonic()
    pager.notify(notice())
    assert time.monotonic() - begin < 0.5
    assert wait_until(lambda: good.got, 5) and time.monotonic() - begin < 0.9
    assert pager.close(0.5) is False


def test_closing_sends_what_waits_and_tells_the_lasting_ones_for_longer(tmp_path: Path) -> None:
    sink = Resending()
    pager = Pager(PageConfig(), tmp_path / "o.db", sinks=[sink])
    pager.start()
    pager.notify(notice())
    assert pager.close(5.0) is True
    assert [d.outlives for d in sink.got] == [False, True]


def test_the_heartbeat_stops_when_the_verifier_does_and_says_goodbye(webhook: Webhook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setenv("PAGE_ALIVE", webhook.url + "/alive/uuid")
    monkeypatch.setenv("PAGE_END", webhook.url + "/end/uuid")
    beat = Heartbeat(interval_s=30, url=Secret(env="PAGE_ALIVE"), end_url=Secret(env="PAGE_END"))
    said: list[str] = []
    pager = Pager(PageConfig(heartbeat=beat), tmp_path / "o.db", now=clock, clock=clock, say=said.append)
    assert pager.heartbeat is not None and pager.heartbeat.beat()
    clock.now += 61
    assert not pager.heartbeat.beat(), "nobody said that the verifier lives"
    pager.alive("step 7")
    assert pager.heartbeat.beat()
    webhook.script = [(500, {}, b"x /alive/uuid")]
    pager.heartbeat.beat()
    pager.close(0.1)
    assert [hit.path for hit in webhook.hits] == ["/alive/uuid", "/alive/uuid", "/end/uuid"]
    assert len(said) == 2 and "uuid" not in "".join(said)
