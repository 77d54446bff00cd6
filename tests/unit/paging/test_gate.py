from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from helpers.live.pages import Clock, FakeSink, notice, step

from proctor.errors import DeliveryError
from proctor.invariants.invariant import Severity, Tier
from proctor.verify.paging.config import Budget
from proctor.verify.paging.ledger import Ledger
from proctor.verify.paging.pager import Pager
from proctor.verify.paging.windows import Maintenance

Make = Callable[..., Pager]


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_a_sink_gets_its_tier_and_severity_only(pager_of: Make) -> None:
    pages, tickets, loud = FakeSink("a", tier="page"), FakeSink("b", tier="ticket"), FakeSink("c", min_severity=Severity.CRITICAL)
    pager = pager_of(pages, tickets, loud)
    pager.notify(notice("k:1"))
    pager.notify(notice("k:2", tier=Tier.TICKET))
    pager.notify(notice("k:3", severity=Severity.CRITICAL))
    step(pager)
    assert [k for _, k in pages.told] == ["k:3", "k:1"]
    assert [k for _, k in tickets.told] == ["k:2"]
    assert [k for _, k in loud.told] == ["k:3"]


def test_a_notice_that_no_sink_takes_is_written_down(pager_of: Make) -> None:
    pager = pager_of(FakeSink(tier="page"))
    pager.notify(notice(tier=Tier.TICKET))
    assert "no sink takes tier ticket" in pager.status().untold[0].reason


def test_a_mute_delays_and_unmuting_tells_what_is_not_over(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    number = pager.ledger.mute(until=clock.now + 3600, reason="storage is moved", by="ada")
    pager.notify(notice("k:1"))
    pager.notify(notice("k:2"))
    pager.notify(notice("k:2", action="resolve"))
    step(pager)
    assert sink.got == [] and pager.status().untold[0].reason == "muted by ada: storage is moved"
    pager.ledger.unmute(number)
    step(pager)
    assert sink.told == [("trigger", "k:1")]


def test_a_mute_ends_by_itself_and_covers_only_what_it_names(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.ledger.mute(until=clock.now + 60, reason="known", code="PR101", key="k:1")
    pager.notify(notice("k:1"))
    pager.notify(notice("k:2"))
    step(pager)
    assert sink.told == [("trigger", "k:2")]
    clock.now += 61
    step(pager)
    assert sink.told == [("trigger", "k:2"), ("trigger", "k:1")]


def test_the_end_of_an_incident_passes_a_mute(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.ledger.mute(until=clock.now + 60, reason="quiet")
    pager.notify(notice(action="resolve"))
    step(pager)
    assert [a for a, _ in sink.told] == ["trigger", "resolve"]


def test_maintenance_holds_back_until_it_is_over(pager_of: Make, clock: Clock) -> None:
    start = datetime.fromtimestamp(clock.now - 60, UTC)
    end = datetime.fromtimestamp(clock.now + 60, UTC)
    sink = FakeSink()
    pager = pager_of(sink, maintenance=(Maintenance(start=start, end=end, reason="upgrade"),))
    pager.notify(notice())
    step(pager)
    assert sink.got == []
    clock.now += 120
    step(pager)
    assert len(sink.got) == 1


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ({"daily": "23:30 - 01:00"}, ["2026-03-01T23:45:00+00:00", "2026-03-02T00:59:00+00:00"], ["2026-03-01T01:00:00+00:00"]),
        ({"daily": "02:00-03:00", "timezone": "Europe/Berlin"}, ["2026-01-10T01:30:00+00:00", "2026-07-10T00:30:00+00:00"], ["2026-07-10T01:30:00+00:00"]),
        ({"weekly": "sat 22:00 - sun 06:00"}, ["2026-03-07T23:00:00+00:00", "2026-03-08T05:59:00+00:00"], ["2026-03-07T21:59:00+00:00", "2026-03-08T06:00:00+00:00"]),
        ({"weekly": "Sunday 22:00 - Monday 02:00"}, ["2026-03-08T23:00:00+00:00", "2026-03-09T01:00:00+00:00"], ["2026-03-09T02:00:00+00:00"]),
        ({"start": datetime(2026, 3, 1, 12), "end": datetime(2026, 3, 1, 13), "timezone": "Europe/Berlin"}, ["2026-03-01T11:30:00+00:00"], ["2026-03-01T12:30:00+00:00"]),
    ],
)  # fmt: skip
def test_windows_are_read_in_their_time_zone(window: dict[str, str], inside: list[str], outside: list[str]) -> None:
    maintenance = Maintenance(**window)  # type: ignore[arg-type]
    assert all(maintenance.holds("any", at(t)) for t in inside)
    assert not any(maintenance.holds("any", at(t)) for t in outside)


def test_a_storm_is_a_few_pages_and_one_digest_that_ends_with_its_last_incident(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink, budget=Budget(pages_per_hour=2, digest_s=30))
    for i in range(10):
        pager.notify(notice(f"k:{i}", title=f"rule {i} failed"))
    step(pager)
    assert len(sink.got) == 2
    clock.now += 31
    step(pager)
    assert len(sink.got) == 3
    digest = sink.got[2].notice
    assert digest.title.startswith("8 more incidents beyond 2 an hour") and digest.text.count("\n") == 7
    for i in range(10):
        assert len([k for a, k in sink.told if a == "resolve" and "digest" in k]) == 0
        pager.notify(notice(f"k:{i}", action="resolve"))
        step(pager)
    assert sink.told[-1] == ("resolve", "proctor:job:digest:page")
    assert sorted(k for a, k in sink.told if a == "resolve") == ["k:0", "k:1", "proctor:job:digest:page"]


def test_thousands_of_incidents_in_one_outage_are_all_counted_at_the_cost_of_one_each(pager_of: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.verify.paging.ledger._MOST_TOLD", 50)
    looks: list[int] = []
    whole = Ledger.digest
    monkeypatch.setattr(Ledger, "digest", lambda self, tier: looks.append(1) or whole(self, tier))
    sink = FakeSink()
    sink.down = DeliveryError("refused")
    pager = pager_of(sink, budget=Budget(pages_per_hour=2, digest_s=0))
    for i in range(300):
        pager.notify(notice(f"k:{i}", title=f"rule {i} failed"))
    assert len(looks) == 1, "one more incident is no reason to look at all of them"
    sink.down = None
    clock.now += 3000
    step(pager)
    digest = sink.got[-1].notice
    assert len(sink.got) == 3 and digest.title.startswith("298 more incidents beyond 2 an hour") and digest.text.endswith("and 258 more")
    for i in range(300):
        pager.notify(notice(f"k:{i}", action="resolve"))
    step(pager)
    assert sink.told[-1] == ("resolve", "proctor:job:digest:page")


def test_the_budget_is_free_again_after_an_hour_and_counts_tiers_apart(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink, budget=Budget(pages_per_hour=1, tickets_per_hour=1))
    pager.notify(notice("k:1"))
    pager.notify(notice("k:2", tier=Tier.TICKET))
    step(pager)
    assert len(sink.got) == 2
    clock.now += 3601
    pager.notify(notice("k:3"))
    step(pager)
    assert [k for _, k in sink.told] == ["k:1", "k:2", "k:3"]


def test_an_update_of_an_open_incident_costs_no_budget(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink, budget=Budget(pages_per_hour=1))
    for i in range(5):
        pager.notify(notice(title=f"{i} layers differ"))
        clock.now += 60
        step(pager)
    assert {k for _, k in sink.told} == {"proctor:job:r1:dp"}


def test_a_ticket_that_becomes_a_page_is_told_to_those_who_are_paged(pager_of: Make) -> None:
    pages, chat = FakeSink("a", tier="page"), FakeSink("b", merges=False)
    pager = pager_of(pages, chat)
    pager.notify(notice(tier=Tier.TICKET))
    step(pager)
    pager.notify(notice())
    step(pager)
    assert len(pages.got) == 1 and len(chat.got) == 2
