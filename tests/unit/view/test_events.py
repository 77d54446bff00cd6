"""The event log: ids, cut lines, rotation, restarts."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.verify.view.events import (
    MAX_LINE,
    CoverageEvent,
    Event,
    EventLog,
    IncidentEvent,
    NoticeEvent,
    StepEvent,
    Tail,
    decode,
    encode,
    log_path,
)


def incident(key="k", state="firing", **more):
    return IncidentEvent(key=key, title=f"title of {key}", state=state, **more)


def everything(run, after=0):
    tail = Tail(log_path(run), after)
    found = []
    while events := tail.read():
        found += events
    tail.close()
    return found


def test_what_is_written_is_read_in_order_with_rising_ids(tmp_path):
    log = EventLog(tmp_path, now=lambda: 12.5)
    written = [incident(), StepEvent(step=3, ranks=2), CoverageEvent(lost={"gap": 4}, silent=[1]), NoticeEvent(action="trigger", key="k")]
    assert [log.append(data) for data in written] == [1, 2, 3, 4]
    assert everything(tmp_path) == [
        Event(i, 12.5, kind, data) for i, (kind, data) in enumerate(zip(("incident", "step", "coverage", "notice"), written), start=1)
    ]
    assert [e.id for e in everything(tmp_path, after=2)] == [3, 4]


def test_a_reader_follows_a_file_that_grows_and_waits_for_the_end_of_a_line(tmp_path):
    tail = Tail(log_path(tmp_path))
    assert tail.read() == []
    log = EventLog(tmp_path)
    log.append(incident("a"))
    assert [e.id for e in tail.read()] == [1]
    line = encode(Event(2, 0.0, "step", StepEvent(step=1)))
    with open(log_path(tmp_path), "ab") as file:
        file.write(line[:20])
    assert tail.read() == []
    with open(log_path(tmp_path), "ab") as file:
        file.write(line[20:])
    assert [e.id for e in tail.read()] == [2]


def test_a_writer_that_was_killed_in_a_line_is_followed_by_one_that_goes_on_counting(tmp_path):
    EventLog(tmp_path).append(incident("a"))
    with open(log_path(tmp_path), "ab") as file:
        file.write(b'{"id":2,"time":1.0,"ki')
    assert EventLog(tmp_path).append(StepEvent(step=9)) == 2
    assert [(e.id, e.kind) for e in everything(tmp_path)] == [(1, "incident"), (2, "step")]


def test_a_new_file_begins_with_the_state_of_every_incident(tmp_path):
    log = EventLog(tmp_path, max_bytes=4000)
    tail = Tail(log_path(tmp_path))
    log.append(incident("old", "resolved"))
    log.append(incident("mine"))
    seen = []
    for step in range(200):
        log.append(StepEvent(step=step))
        seen += tail.read()
    while events := tail.read():
        seen += events
    assert [e.data.step for e in seen if isinstance(e.data, StepEvent)] == list(range(200))
    assert len({e.id for e in seen}) == len(seen)
    fresh = everything(tmp_path)
    assert [e.data.key for e in fresh[:2]] == ["old", "mine"]
    assert log_path(tmp_path).stat().st_size < 5000
    assert log.lost == 0


def test_a_disk_that_is_gone_costs_events_and_no_error(tmp_path):
    (tmp_path / "verify").write_text("a file where the folder should be")
    log = EventLog(tmp_path)
    assert log.append(incident()) == 1
    assert log.lost == 1
    (tmp_path / "verify").unlink()
    log.append(incident())
    assert [e.id for e in everything(tmp_path)] == [2]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "verify").mkdir()
    (tmp_path / "secret").write_bytes(encode(Event(1, 0.0, "step", StepEvent(step=1))))
    log_path(tmp_path).symlink_to(tmp_path / "secret")
    assert everything(tmp_path) == []
    log = EventLog(tmp_path)
    log.append(incident())
    assert log.lost == 1


def test_texts_are_bounded_and_what_is_too_long_is_skipped(tmp_path):
    log = EventLog(tmp_path)
    log.append(incident(details={"x" * 500: "y" * 10**6}, capsule="c" * 10**6))
    (found,) = everything(tmp_path)
    assert len(encode(found)) < 20_000
    with open(log_path(tmp_path), "ab") as file:
        file.write(b"[" * (MAX_LINE * 3) + b"\n" + encode(Event(7, 0.0, "step", StepEvent(step=1))))
    assert [e.id for e in everything(tmp_path)] == [1, 7]


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"[]", b'{"id":1}', b'{"id":-1,"time":0,"kind":"step","data":{"step":1}}', b"\xff\xfe", b"[" * 5000,
     b'{"id":1,"time":0,"kind":"who","data":{}}', b'{"id":1,"time":0,"kind":"step","data":{"step":"x"}}'],
)  # fmt: skip
def test_lines_that_are_no_events_are_left_out(line):
    assert decode(line) is None


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 3000), max_size=6), junk=st.binary(max_size=40))
def test_any_pieces_give_the_same_events(tmp_path_factory, cuts, junk):
    run = tmp_path_factory.mktemp("run")
    (run / "verify").mkdir()
    blob = b"".join(encode(Event(i, 1.0, "incident", incident(f"k{i}"))) for i in range(1, 12))
    blob = junk.replace(b"\n", b"") + b"\n" + blob
    tail, seen, start = Tail(log_path(run)), [], 0
    for cut in [*sorted(min(c, len(blob)) for c in cuts), len(blob)]:
        with open(log_path(run), "ab") as file:
            file.write(blob[start:cut])
        start = cut
        seen += tail.read()
    assert [e.id for e in seen] == list(range(1, 12))
    os.unlink(log_path(run))
