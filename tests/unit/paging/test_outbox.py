# More than 400 lines: all of these drive one outbox with one receiver and one clock.
from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.live.pages import Clock, FakeSink, notice, step
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.errors import DeliveryError, OutboxError
from proctor.invariants.invariant import Severity
from proctor.verify.paging.outbox import CAP_S, Outbox
from proctor.verify.paging.pager import Pager
from proctor.verify.paging.store import Store

Make = Callable[..., Pager]

REFUSED = DeliveryError("refused")
LOST = DeliveryError("no answer", unsure=True)
REJECTED = DeliveryError("bad request", retry=False)


def test_a_trigger_and_its_resolve_arrive_once_and_in_order(pager_of: Make) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice(action="resolve"))
    step(pager)
    assert sink.told == [("trigger", "proctor:job:r1:dp"), ("resolve", "proctor:job:r1:dp")]
    assert sink.got[1].opened == sink.got[0].notice


def test_twenty_thousand_notices_are_few_rows_while_the_receiver_is_down(pager_of: Make, tmp_path: Path) -> None:
    sink = FakeSink()
    sink.down = REFUSED
    pager = pager_of(sink)
    for i in range(20_000):
        pager.notify(notice(f"proctor:job:r{i % 5}:dp"))
    db = sqlite3.connect(tmp_path / "verify" / "outbox.db")
    assert db.execute("SELECT COUNT(*) FROM message").fetchone() == (5,)
    sink.down = None
    step(pager)
    assert len(sink.got) == 5


def test_a_resolve_whose_trigger_never_left_cancels_both(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    sink.down = REFUSED
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice(action="resolve"))
    sink.down = None
    clock.now += 1000
    step(pager)
    assert sink.got == [] and pager.status().waiting == 0


def test_a_resolve_is_sent_when_the_trigger_may_have_arrived(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    sink.down = LOST
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice(action="resolve"))
    sink.down = None
    clock.now += 1000
    step(pager)
    assert sink.told == [("resolve", "proctor:job:r1:dp")]
    assert sink.got[0].opened is not None, "with what it may have taken, for the labels"


def test_an_incident_that_goes_on_before_its_end_was_told_is_neither_ended_nor_told_again(pager_of: Make) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice(action="resolve"))
    pager.notify(notice(at=7.0))
    step(pager)
    assert len(sink.got) == 1


def test_what_repeats_is_not_sent_again_and_what_changes_waits_for_the_pace(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice())
    pager.notify(notice(title="more differs"))
    pager.notify(notice(title="even more differs"))
    step(pager)
    assert len(sink.got) == 1
    clock.now += sink.update_s
    step(pager)
    assert [d.notice.title for d in sink.got[1:]] == ["even more differs"]


def test_an_update_that_waits_goes_at_once_when_it_gets_worse(pager_of: Make) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    pager.notify(notice(title="x"))
    pager.notify(notice(title="y", severity=Severity.CRITICAL))
    step(pager)
    assert [d.notice.title for d in sink.got[1:]] == ["y"]


def test_a_receiver_that_cannot_merge_hears_of_an_incident_again_only_when_it_gets_worse(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink(merges=False)
    pager = pager_of(sink)
    for changed in (notice(), notice(title="x"), notice(severity=Severity.CRITICAL), notice(title="y")):
        pager.notify(changed)
        step(pager)
        clock.now += 3600
    assert [d.notice.severity.value for d in sink.got] == ["error", "critical"]


def test_retries_back_off_up_to_the_cap_and_honour_what_the_receiver_asks(tmp_path: Path, clock: Clock) -> None:
    store, sink = Store(tmp_path / "o.db"), FakeSink()
    outbox = Outbox(store, clock, jitter=lambda: 1.0)
    outbox.put(sink, notice())
    waits = []
    for _ in range(12):
        message = outbox.due(sink)
        assert message is not None and outbox.begin(message)
        waits.append(outbox.failed(sink, message, "down", unsure=False))
        assert outbox.due(sink) is None
        clock.now += waits[-1]
    assert waits[:4] == [1, 2, 4, 8] and waits[-1] == CAP_S
    message = outbox.due(sink)
    assert message is not None and outbox.begin(message)
    assert outbox.failed(sink, message, "busy", unsure=False, retry_after_s=700.0) == 700.0
    store.close()


def test_every_attempt_carries_the_same_event_id(pager_of: Make, clock: Clock) -> None:
    seen: list[str] = []

    class Flaky(FakeSink):
        def send(self, delivery: object) -> None:
            seen.append(delivery.event_id)  # type: ignore[attr-defined]
            raise LOST

    pager = pager_of(Flaky())
    pager.notify(notice())
    for _ in range(4):
        clock.now += 400
        step(pager)
    assert len(seen) >= 4 and len(set(seen)) == 1


def test_a_rejected_notice_is_dead_and_said_and_can_be_revived(pager_of: Make, said: list[str], tmp_path: Path) -> None:
    sink = FakeSink()
    sink.down = REJECTED
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    assert pager.status().sinks["fake"].dead == 1 and sink.tries == 1
    assert any("bad request" in text for text in said)
    sink.down = None
    other = Store(tmp_path / "verify" / "outbox.db", create=False)
    Outbox(other, lambda: 1_800_000_000.0).hurry(dead=True)
    other.close()
    step(pager)
    assert len(sink.got) == 1


def test_what_is_merged_while_a_request_is_on_its_way_is_not_lost(pager_of: Make, clock: Clock) -> None:
    class Slow(FakeSink):
        def send(self, delivery: object) -> None:
            super().send(delivery)  # type: ignore[arg-type]
            if len(self.got) == 1:
                pager.notify(notice(title="worse now", severity=Severity.CRITICAL))

    sink = Slow()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    assert [d.notice.severity.value for d in sink.got] == ["error", "critical"]
    assert sink.got[0].event_id == sink.got[1].event_id or sink.got[1].opened is not None


def test_what_is_merged_on_the_way_is_no_second_message_to_a_receiver_that_cannot_merge(pager_of: Make, clock: Clock) -> None:
    class Slow(FakeSink):
        def send(self, delivery: object) -> None:
            super().send(delivery)  # type: ignore[arg-type]
            pager.notify(notice(title=f"now {len(self.got)}"))

    sink = Slow(merges=False)
    pager = pager_of(sink)
    pager.notify(notice())
    for _ in range(3):
        step(pager)
        clock.now += 4000
    assert len(sink.got) == 1


def test_a_resolve_that_may_have_arrived_goes_before_the_next_trigger(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    sink.down = LOST
    pager.notify(notice(action="resolve"))
    step(pager)
    pager.notify(notice(title="again"))
    sink.down = None
    clock.now += 0.5
    step(pager)
    assert len(sink.got) == 1, "the new trigger waits for the resolve"
    clock.now += 4000
    step(pager)
    assert [a for a, _ in sink.told] == ["trigger", "resolve", "trigger"]


def test_a_resolve_that_comes_while_the_trigger_is_on_its_way_follows_it(pager_of: Make) -> None:
    class Slow(FakeSink):
        def send(self, delivery: object) -> None:
            super().send(delivery)  # type: ignore[arg-type]
            if len(self.got) == 1:
                pager.notify(notice(action="resolve"))

    sink = Slow()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    assert [a for a, _ in sink.told] == ["trigger", "resolve"]


def test_a_restart_sends_what_was_left_and_knows_what_is_open(pager_of: Make, clock: Clock) -> None:
    first, second = FakeSink(), FakeSink()
    first.down = REFUSED
    pager = pager_of(first)
    pager.notify(notice())
    step(pager)
    pager.close(0)
    again = pager_of(second)
    step(again)
    again.notify(notice())
    step(again)
    assert len(second.got) == 1


def test_a_full_disk_costs_no_page_and_the_outbox_returns_to_the_disk(pager_of: Make, said: list[str], clock: Clock, tmp_path: Path) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    db = pager._store._db
    db.execute(f"PRAGMA max_page_count={db.execute('PRAGMA page_count').fetchone()[0]}")
    for i in range(40):
        pager.notify(notice(f"proctor:job:r{i}:dp", text="x" * 5000, severity=Severity.CRITICAL))
        step(pager)
    assert not pager.status().durable
    assert len(sink.got) == 7, "six pages and the digest of the others"
    assert sum("full" in text for text in said) == 1
    clock.now += 20
    pager.tick()
    assert pager.status().durable
    with sqlite3.connect(tmp_path / "verify" / "outbox.db") as disk:
        assert disk.execute("SELECT COUNT(*) FROM incident").fetchone() == (7,)


def test_a_locked_outbox_does_not_hold_up_the_verifier(pager_of: Make, said: list[str], tmp_path: Path) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    other = sqlite3.connect(tmp_path / "verify" / "outbox.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    pager.notify(notice())
    pager.notify(notice("proctor:job:r2:dp"))
    assert sum("locked" in text for text in said) == 1
    other.execute("COMMIT")
    step(pager)
    assert len(sink.got) == 2


def test_a_process_that_never_lets_go_of_the_outbox_does_not_stop_the_pages(pager_of: Make, tmp_path: Path, clock: Clock) -> None:
    sink = FakeSink()
    pager = pager_of(sink)
    pager._store.patience_s = 0.0
    stuck = sqlite3.connect(tmp_path / "verify" / "outbox.db", isolation_level=None)
    stuck.execute("BEGIN IMMEDIATE")
    for _ in range(3):
        pager.notify(notice())
        step(pager)
    assert len(sink.got) == 1
    stuck.execute("COMMIT")
    clock.now += 20
    step(pager)
    assert pager.status().durable


def test_an_outbox_that_cannot_be_opened_keeps_what_lies_in_it(pager_of: Make, tmp_path: Path, clock: Clock) -> None:
    down, sink = FakeSink(), FakeSink()
    down.down = REFUSED
    before = pager_of(down)
    before.notify(notice("k:old"))
    step(before)
    before.close(0)
    stuck = sqlite3.connect(tmp_path / "verify" / "outbox.db", isolation_level=None)
    stuck.execute("PRAGMA locking_mode=EXCLUSIVE")
    stuck.execute("BEGIN EXCLUSIVE")
    pager = pager_of(sink)
    pager.notify(notice("k:new"))
    step(pager)
    stuck.execute("COMMIT")
    stuck.close()
    clock.now += 20
    step(pager)
    clock.now += 400
    step(pager)
    assert pager.status().durable
    assert sorted(k for _, k in sink.told) == ["k:new", "k:old"]


def test_two_processes_on_one_outbox_send_once(pager_of: Make) -> None:
    first, second = FakeSink(), FakeSink()
    one, two = pager_of(first), pager_of(second)
    one.notify(notice())
    step(one)
    step(two)
    two.notify(notice("proctor:job:r2:dp"))
    step(two)
    step(one)
    assert len(first.got) == 2 and second.got == []


def test_a_broken_file_is_put_aside(pager_of: Make, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "verify" / "outbox.db"
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    sink = FakeSink()
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    assert len(sink.got) == 1 and (tmp_path / "verify" / "outbox.db.broken-1").exists()
    assert any("broken" in text for text in said)


def test_a_newer_outbox_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "o.db") as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(OutboxError, match="newer"):
        Store(tmp_path / "o.db", create=False)


def test_the_outbox_is_the_owner_s_alone(pager_of: Make, tmp_path: Path) -> None:
    pager_of(FakeSink())
    assert (tmp_path / "verify" / "outbox.db").stat().st_mode & 0o077 == 0


def test_a_clock_that_jumps_back_does_not_stop_the_retries(pager_of: Make, clock: Clock) -> None:
    sink = FakeSink()
    sink.down = REFUSED
    pager = pager_of(sink)
    pager.notify(notice())
    step(pager)
    sink.down = None
    wall = Clock()
    wall.now = clock.now - 86_400
    pager._outbox._now = wall  # persons' time jumps, monotonic time goes on
    clock.now += 400
    step(pager)
    step(pager)
    assert len(sink.got) == 1


def test_notices_of_many_threads_all_arrive(pager_of: Make) -> None:
    sink = FakeSink()
    pager = pager_of(sink)

    def work(n: int) -> None:
        for i in range(6):
            pager.notify(notice(f"proctor:job:r{n}.{i}:dp", severity=Severity.CRITICAL))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    step(pager)
    assert len(sink.got) == 7


EVENTS = st.lists(
    st.sampled_from(["trigger", "change", "worse", "resolve", "up", "refused", "lost", "wait", "restart"]), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_whatever_happens_the_receiver_ends_up_knowing_the_truth(tmp_path_factory: pytest.TempPathFactory, events: list[str]) -> None:
    """Laws: trigger before resolve, no second trigger that says the same, and at the end open exactly when it is."""
    path, clock, sink = tmp_path_factory.mktemp("o") / "o.db", Clock(), FakeSink()
    store = Store(path)
    outbox = Outbox(store, clock, jitter=lambda: 0.5)
    is_on, n = False, 0

    def work() -> None:
        while (message := outbox.due(sink)) is not None and outbox.begin(message):
            try:
                sink.send(message.delivery)
            except DeliveryError as error:
                if error.unsure:
                    sink.got.append(message.delivery)  # the worst case: it did arrive
                outbox.failed(sink, message, error.message, unsure=error.unsure)
            else:
                outbox.sent(sink, message)

    for event in [*events, "up", "wait", "wait"]:
        if event in ("trigger", "change", "worse"):
            n += event == "change"
            outbox.put(sink, notice(title=f"t{n}", severity=Severity.CRITICAL if event == "worse" else Severity.ERROR))
            is_on = True
        elif event == "resolve":
            outbox.put(sink, notice(action="resolve"))
            is_on = False
        elif event == "restart":
            store.close()
            store = Store(path)
            outbox = Outbox(store, clock, jitter=lambda: 0.5)
        elif event == "wait":
            clock.now += 4000
        else:
            sink.down = {"up": None, "refused": REFUSED, "lost": LOST}[event]
        work()
    store.close()
    believed = False
    for delivery in sink.got:
        believed = delivery.notice.action.value == "trigger"
    assert believed == is_on
    told = [d for d in sink.got if d.notice.action.value == "trigger"]
    by_id: dict[str, set[str]] = {}
    for d in told:
        by_id.setdefault(d.event_id, set()).add(d.notice.title + d.notice.severity)
    assert all(len(texts) == 1 for texts in by_id.values()), "one id, one event"
