"""A relay carries what processes and the verifier say to each other, and nothing is lost when it or the verifier goes away."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.live.transport import Rows as Made
from helpers.live.transport import encoded, sender, serving, take, until

from benchmarks.faults.outside import Lossy
from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import Flush, Freeze, Hello
from proctor.invariants.wire.peer import connect, parse_address, prove, read_token
from proctor.verify.transport import relay as relay_module
from proctor.verify.transport.inbox import Event, Gap, Inbox, Joined, Left, Rows
from proctor.verify.transport.relay import Relay
from proctor.verify.transport.server import Server


@contextmanager
def relaying(folder: Path, upstream: str) -> Iterator[Relay]:
    with Relay([f"unix:{folder}/relay/sock"], upstream, read_token(folder / "token")) as relay:
        yield relay


def flushes(events: list[Event], process: str) -> list[int | None]:
    return [e.reached for e in events if isinstance(e, Rows) and e.process == process]


def test_many_processes_come_through_one_connection(tmp_path: Path) -> None:
    heard: list[str] = []
    with serving(tmp_path, address="tcp:127.0.0.1:0") as (server, inbox), relaying(tmp_path, server.addresses[0]) as relay:
        assert until(lambda: relay.connected)
        ends = [sender(tmp_path, f"{r}-1", relay.addresses[0], on_freeze=lambda k, s: heard.append(k)) for r in range(6)]
        for end in ends:
            end.start()
        made = [Made() for _ in ends]
        sent = []
        for step in range(20):
            for rank, end in enumerate(ends):
                rows = made[rank].next(names=1)
                sent.append(rows)
                end.offer(encoded(rows), step)
        events = take(inbox, lambda e: len([x for x in e if isinstance(x, Rows)]) == 120)
        assert server.stats().connections == 1
        server.send("3-1", Freeze("three", 1))
        assert until(lambda: heard == ["three"])
        for end in ends:
            end.close()
        events += take(inbox, lambda e: len([x for x in e if isinstance(x, Left)]) == 6)
    for rank in range(6):
        assert flushes(events, f"{rank}-1") == list(range(20))
    assert {e.process for e in events if isinstance(e, Joined)} == {f"{r}-1" for r in range(6)}
    assert {e.how for e in events if isinstance(e, Left)} == {"bye"}
    assert not any(isinstance(e, Gap) for e in events)
    assert server.stats().refused == {}


def test_a_verifier_that_is_back_gets_what_it_lacks_through_the_relay(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0") as (server, inbox):
        address = server.addresses[0]
        with relaying(tmp_path, address) as relay:
            end, made = sender(tmp_path, "0-1", relay.addresses[0]), Made()
            end.start()
            for step in range(10):
                end.offer(encoded(made.next()), step)
            take(inbox, lambda e: len(flushes(e, "0-1")) == 10)
            server.close()
            assert until(lambda: not relay.connected and not end.connected)
            for step in range(10, 20):
                end.offer(encoded(made.next()), step)
            again = Inbox()
            with Server([address], read_token(tmp_path / "token"), again):
                events = take(again, lambda e: len(flushes(e, "0-1")) == 20)
                end.close()
    assert flushes(events, "0-1") == list(range(20))
    assert not any(isinstance(e, Gap) for e in events)


def test_a_relay_that_is_gone_is_a_broken_connection_of_its_processes(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0", grace_s=0.2) as (server, inbox):
        with relaying(tmp_path, server.addresses[0]) as relay:
            ends = [sender(tmp_path, f"{r}-1", relay.addresses[0]) for r in range(2)]
            for end in ends:
                end.start()
            take(inbox, lambda e: len(e) == 2)
        left = take(inbox, lambda e: len(e) == 2)
        assert {(e.process, e.how) for e in left if isinstance(e, Left)} == {("0-1", "eof"), ("1-1", "eof")}
        for end in ends:
            end.close()


def test_one_process_that_breaks_rules_does_not_harm_the_others(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0", grace_s=0.0) as (server, inbox), relaying(tmp_path, server.addresses[0]) as relay:
        assert until(lambda: relay.connected)
        good, made = sender(tmp_path, "0-1", relay.addresses[0]), Made()
        good.start()
        take(inbox, lambda e: len(e) == 1)
        for junk in (frames.encode(frames.Ping(), number=5), b"nonsense", frames.encode(Flush(0, 0, (0,) * 5, (0,) * 5, (0,) * 5))):
            bad = connect(parse_address(relay.addresses[0]), 5.0)
            prove(bad, read_token(tmp_path / "token"), "rank", 5.0)
            bad.sendall(junk)
            bad.settimeout(5.0)
            with contextlib.suppress(ConnectionError):
                while bad.recv(4096):
                    pass
        good.offer(encoded(made.next()), 0)
        assert flushes(take(inbox, lambda e: bool(flushes(e, "0-1"))), "0-1") == [0]
        assert relay.refused == {"frames out of order": 1, "not a frame": 1, "unexpected message": 1}
        good.close()


def test_records_that_are_damaged_cost_their_process_its_channel_and_nobody_else(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0", grace_s=0.0) as (server, inbox), relaying(tmp_path, server.addresses[0]) as relay:
        assert until(lambda: relay.connected)
        good, made = sender(tmp_path, "0-1", relay.addresses[0]), Made()
        good.start()
        take(inbox, lambda e: len(e) == 1)
        bad = connect(parse_address(relay.addresses[0]), 5.0)
        prove(bad, read_token(tmp_path / "token"), "rank", 5.0)
        bad.sendall(frames.encode(Hello("1-1", "h", "s", {})))
        bad.sendall(frames.encode(Flush(0, 0, (0,) * 5, (1,) * 5, (2,) * 5), number=1, body=[b"0123456789"]))
        bad.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            while bad.recv(4096):
                pass
        good.offer(encoded(made.next()), 0)
        events = take(inbox, lambda e: bool(flushes(e, "0-1")) and any(isinstance(x, Left) for x in e))
        assert [type(e) for e in events if e.process == "1-1"] == [Joined, Left]
        assert server.stats().refused == {"malformed records": 1}
        assert good.connected and good.connections == 1
        good.close()


def test_a_verifier_that_takes_nothing_fills_relay_and_ring_but_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "STORE_BYTES", 1 << 20)
    inbox = Inbox(max_events=1)
    with serving(tmp_path, inbox, address="tcp:127.0.0.1:0") as (server, _), relaying(tmp_path, server.addresses[0]) as relay:
        end, made = sender(tmp_path, "0-1", relay.addresses[0], ring_bytes=1 << 20), Made()
        end.start()
        assert until(lambda: end.connected)
        sent = 0
        while not end.ring.dropped_flushes and sent < 4000:
            end.offer(encoded(made.next(calls=1000)), sent)
            sent += 1
            time.sleep(0.001)
        assert end.ring.dropped_flushes
        up = relay._up
        assert up is not None and len(up.out) < 3 << 20
        events: list[Event] = []
        assert until(lambda: events.extend(inbox.get(0.01)) or not end.ring.waiting)
        end.offer(encoded(made.next()), sent)
        assert until(lambda: events.extend(inbox.get(0.01)) or sent in flushes(events, "0-1"))
        end.close()
        events += take(inbox, lambda e: any(isinstance(x, Left) for x in e))
    missed = sum(e.last - e.first + 1 for e in events if isinstance(e, Gap))
    assert missed == end.ring.dropped_flushes
    assert len([r for r in flushes(events, "0-1") if r is not None]) + missed == sent + 1
    assert isinstance(events[-1], Left) and events[-1].how == "bye"


def test_without_a_verifier_processes_are_hung_up_on(tmp_path: Path) -> None:
    from proctor.invariants.wire.peer import make_token

    make_token(tmp_path / "token")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with relaying(tmp_path, f"tcp:127.0.0.1:{closed.getsockname()[1]}") as relay:
            end = sender(tmp_path, "0-1", relay.addresses[0])
            end.start()
            assert until(lambda: relay.problem != "")
            end.offer(encoded(Made().next()), 0)
            time.sleep(0.3)
            assert not end.connected
            assert relay.refused == {}
            end.close()


def test_a_way_to_the_verifier_that_breaks_again_and_again_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0", grace_s=30.0) as (server, inbox):
        way = Lossy(("127.0.0.1", int(server.addresses[0].rpartition(":")[2])), 96 * 1024)
        with relaying(tmp_path, f"tcp:127.0.0.1:{way.port}") as relay:
            assert until(lambda: relay.connected)
            ends = [sender(tmp_path, f"{r}-1", relay.addresses[0]) for r in range(3)]
            for end in ends:
                end.start()
            made = [Made() for _ in ends]
            for step in range(12):
                for rank, end in enumerate(ends):
                    end.offer(encoded(made[rank].next(calls=100)), step)
                time.sleep(0.02)
            events = take(inbox, lambda e: len([x for x in e if isinstance(x, Rows) and x.reached is not None]) == 36, 40)
            for end in ends:
                end.close()
    for rank in range(3):
        assert [r for r in flushes(events, f"{rank}-1") if r is not None] == list(range(12)), "each once, in order"
    assert not any(isinstance(e, Gap) for e in events) and way.cuts >= 2
