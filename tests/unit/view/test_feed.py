"""The feed without a network: bounded queues, coming back, what is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from proctor.verify.view import feed as feeds
from proctor.verify.view.events import EventLog, IncidentEvent, StepEvent
from proctor.verify.view.feed import Feed


def incident(key):
    return IncidentEvent(key=key, title=key, state="firing")


def texts(reader):
    found = []
    while not reader.queue.empty():
        found.append(reader.queue.get_nowait())
    return found


def ids(reader):
    return [int(t.split("\n")[0][4:]) for t in texts(reader) if t and t.startswith("id: ")]


@pytest.fixture
def made(tmp_path):
    log, feed = EventLog(tmp_path), Feed(tmp_path)
    return log, feed


def test_of_several_steps_at_once_the_last_is_passed_on(made):
    log, feed = made
    reader = feed.join(None)
    for step in range(100):
        log.append(StepEvent(step=step))
    log.append(incident("a"))
    feed.poll()
    assert ids(reader) == [100, 101]


def test_a_reader_who_does_not_keep_up_is_let_go_and_the_others_are_not(made, monkeypatch):
    monkeypatch.setattr(feeds, "MAX_QUEUE", 10)
    log, feed = made
    slow, quick = feed.join(None), feed.join(None)
    seen = []
    for i in range(40):
        log.append(incident(f"k{i}"))
        feed.poll()
        seen += ids(quick)
    assert seen == list(range(1, 41))
    assert (feed.readers, feed.let_go) == (1, 1)
    assert texts(slow) == [None]


def test_who_was_away_too_long_gets_the_state_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(feeds, "HELD", 5)
    log, feed = EventLog(tmp_path), Feed(tmp_path)
    feed._held = type(feed._held)(maxlen=5)
    for i in range(20):
        log.append(incident(f"k{i % 3}"))
    feed.poll()
    back = feed.join(16)
    assert ids(back) == [17, 18, 19, 20]
    away = texts(feed.join(3))
    assert away[0].startswith("event: reset")
    assert len(away) == 4


def test_there_are_only_so_many_readers(made, monkeypatch):
    monkeypatch.setattr(feeds, "MAX_READERS", 2)
    _, feed = made
    first = feed.join(None)
    assert feed.join(None) is not None
    assert feed.join(None) is None
    feed.leave(first)
    assert feed.join(None) is not None


def test_closing_ends_every_connection(made):
    async def scenario():
        _, feed = made
        reader = feed.join(0)
        feed.close()
        return await asyncio.wait_for(reader.queue.get(), 1)

    assert asyncio.run(scenario()) is None
