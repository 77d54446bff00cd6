"""The server takes what peers of the job send, in order, and cuts everybody else off and counts them."""

# More than 400 lines: all of these talk to one server as one kind of peer.
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.live.transport import Rows as Made
from helpers.live.transport import encoded, sender, serving, take, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.errors import TransportError
from proctor.invariants.wire import frames, peer
from proctor.invariants.wire.frames import Challenge, Flush, Frame, Freeze, Glances, Hello, Proof, Welcome
from proctor.invariants.wire.peer import Address, connect, make_token, parse_address, prove, read_token
from proctor.verify.transport.endpoint import Limits
from proctor.verify.transport.inbox import Event, Gap, Glanced, Inbox, Joined, Left, Rows, Told
from proctor.verify.transport.server import Server


def of(kind: type, events: list[Event]) -> list[Event]:
    return [e for e in events if isinstance(e, kind)]


class Peer:
    """A process that says what a test tells it to."""

    def __init__(self, folder: Path, role: str = "rank", address: str = "") -> None:
        self.socket = connect(parse_address(address or f"unix:{folder}/live/sock"), 5.0)
        self.decoder = prove(self.socket, read_token(folder / "token"), role, 5.0)
        self.numbers: dict[int, int] = {}

    def say(self, message: frames.Message, body: list[bytes] | None = None, channel: int = 0) -> None:
        number = self.numbers.get(channel, 0)
        self.numbers[channel] = number + 1
        self.socket.sendall(frames.encode(message, channel=channel, number=number, body=body or ()))

    def flush(self, n: int, made: Made, *, said: bool = True, channel: int = 0) -> None:
        at = tuple(made.at[t] for t in frames.ORDER)
        rows, sizes, body = frames.pack(encoded(made.next()))
        if said:
            self.say(Flush(n, n, at, rows, sizes), body, channel)

    def hear(self) -> Frame:
        self.socket.settimeout(5.0)
        while (frame := self.decoder.next()) is None:
            data = self.socket.recv(4096)
            if not data:
                raise ConnectionResetError
            self.decoder.put(data)
        return frame

    def cut_off(self) -> bool:
        self.socket.settimeout(5.0)
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionError:
            return True
        return True


def hello(name: str = "0-1", start: str = "a") -> Hello:
    return Hello(name, "here", start, {"rank": 0})


def test_rows_arrive_in_order_with_what_the_process_says_of_itself(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, inbox):
        end, made = sender(tmp_path), Made()
        end.start()
        sent = [made.next(names=1) for _ in range(40)]
        for step, rows in enumerate(sent):
            assert end.offer(encoded(rows), step)
        assert until(lambda: end.connected)  # what it is told before, its greeting says
        end.inform({"rank": 0, "finished": True})
        end.close()
        events = take(inbox, lambda e: bool(of(Left, e)))
    assert [type(e) for e in events] == [Joined, *[Rows] * 40, Told, Left]
    assert [e.reached for e in of(Rows, events)] == list(range(40))
    for event, rows in zip(of(Rows, events), sent, strict=True):
        assert event.records.keys() == rows.keys()
        assert all(event.records[t].equals(rows[t]) for t in rows)
    assert events[-1].how == "bye"
    assert server.stats().refused == {}


def test_what_changes_while_a_process_greets_is_told_after_it(tmp_path: Path) -> None:
    end = sender(tmp_path)

    def greets() -> tuple[str, str, dict[str, Any]]:
        end.inform({"rank": 0, "finished": True})
        return "0-1", "here", {"rank": 0}

    end._hello = greets
    with serving(tmp_path) as (_, inbox):
        end.start()
        events = take(inbox, lambda e: bool(of(Told, e)))
        end.close()
    assert [e.info for e in of(Told, events)] == [{"rank": 0, "finished": True}]


def test_more_than_a_frame_holds_comes_in_parts_and_the_step_with_the_last(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, inbox):
        end, made = sender(tmp_path, ring_bytes=64 << 20), Made()
        end.start()
        assert end.offer(encoded(made.next()), 1)
        assert end.offer(encoded(made.next(calls=400_000, names=10)), 2)
        end.close(10.0)
        events = take(inbox, lambda e: bool(of(Left, e)), 20)
        assert server.stats().refused == {}
    rows = of(Rows, events)
    assert len(rows) > 3
    assert [e.reached for e in rows] == [1] * (len(rows) - 1) + [2]
    calls = [n for e in rows if "calls" in e.records for n in e.records["calls"].column("seq").to_pylist()]
    assert calls == list(range(made.at["calls"]))
    assert list(rows[1].records) in (["context"], ["names"])
    assert not of(Gap, events)


def test_a_missing_flush_is_a_gap_before_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, inbox):
        peer_, made = Peer(tmp_path), Made()
        peer_.say(hello())
        peer_.flush(0, made)
        for n in (1, 2):
            peer_.flush(n, made, said=False)
        peer_.flush(3, made)
        events = take(inbox, lambda e: len(of(Rows, e)) == 2)
    assert [type(e) for e in events] == [Joined, Rows, Gap, Rows]
    gap = events[2]
    assert (gap.first, gap.last, gap.rows) == (1, 2, 62)
    assert gap.spans["calls"] == (20, 60) and gap.spans["names"] == (0, 0)


def test_a_process_that_comes_back_is_told_what_is_here(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, inbox):
        first, made = Peer(tmp_path), Made()
        first.say(hello())
        assert first.hear().message() == Welcome(-1)
        first.flush(0, made)
        take(inbox, lambda e: bool(of(Rows, e)))
        first.socket.close()
        second = Peer(tmp_path)
        second.say(hello())
        assert second.hear().message() == Welcome(0)
        second.flush(1, made)
        events = take(inbox, lambda e: bool(of(Rows, e)))
        assert [type(e) for e in events] == [Told, Rows]  # back in time: the core need not know
        other = Peer(tmp_path)
        other.say(hello(start="b"))
        assert other.hear().message() == Welcome(-1)
        events = take(inbox, lambda e: bool(of(Joined, e)))
    assert [(type(e), e.process) for e in events] == [(Left, "0-1"), (Joined, "0-1~2")]
    assert events[0].how == "replaced"


def test_a_broken_connection_is_told_after_the_grace(tmp_path: Path) -> None:
    with serving(tmp_path, grace_s=0.1) as (_, inbox):
        one = Peer(tmp_path)
        one.say(hello())
        take(inbox, lambda e: bool(e))
        one.socket.close()
        (left,) = take(inbox, lambda e: bool(e))
        assert isinstance(left, Left) and left.how == "eof"
        back = Peer(tmp_path)
        back.say(hello())
        (joined,) = take(inbox, lambda e: bool(e))
        assert isinstance(joined, Joined) and joined.resumed


def test_a_silent_process_is_told_as_timed_out(tmp_path: Path) -> None:
    with serving(tmp_path, grace_s=0.0, limits=Limits(silent_s=0.3)) as (_, inbox):
        one = Peer(tmp_path)
        one.say(hello())
        events = take(inbox, lambda e: bool(of(Left, e)))
        assert events[-1].how == "timeout"


def test_freeze_reaches_the_process_now_or_when_it_is_back(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    with serving(tmp_path, grace_s=30.0) as (server, inbox):
        end = sender(tmp_path, on_freeze=lambda key, step: heard.append((key, step)))
        end.start()
        take(inbox, lambda e: bool(of(Joined, e)))
        server.send("0-1", Freeze("k", 3))
        assert until(lambda: heard == [("k", 3)])
        socket_ = end._socket
        assert socket_ is not None
        socket_.shutdown(socket.SHUT_RDWR)
        server.send("0-1", Freeze("l", 4))
        assert until(lambda: len(heard) == 2)
        server.send("9-9", Freeze("x", 1))  # nobody: nothing happens
        end.close()


def test_glances_arrive_with_the_names_of_their_pieces(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, inbox):
        out = sender(tmp_path, "0-1")
        waiting = [Glances(["fc.weight:0", "fc.bias:0"], [(7, 0, 1 << 63), (7, 1, 5), (8, 0, 3)])]
        out.glances = lambda: waiting.pop() if waiting else None
        out.start()
        out.offer(encoded(Made().next()), 9)
        events = take(inbox, lambda es: bool(of(Glanced, es)))
        out.close()
        (found,) = of(Glanced, events)
        assert found == Glanced("0-1", [(7, "fc.weight:0", 1 << 63), (7, "fc.bias:0", 5), (8, "fc.weight:0", 3)])


def test_a_glance_at_a_piece_without_a_name_is_no_message(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, inbox):
        peer = Peer(tmp_path)
        peer.say(Hello("0-1", "here", "a" * 16, {}))
        peer.say(Glances(["fc.weight:0"], [(7, 1, 5)]))
        assert until(lambda: server.stats().refused) and not of(Glanced, inbox.get(0.0))


def test_a_slow_core_stops_the_reading_and_nobody_is_blamed(tmp_path: Path) -> None:
    inbox = Inbox(max_events=20)
    with serving(tmp_path, inbox, limits=Limits(silent_s=0.4)) as (server, _):
        end, made = sender(tmp_path, ring_bytes=1 << 20), Made()
        end.start()
        assert until(lambda: end.connected)
        for step in range(400):
            end.offer(encoded(made.next(calls=200)), step)
            time.sleep(0.001)
        time.sleep(0.6)
        assert len(inbox) < 100
        assert end.ring.dropped_flushes > 0
        events: list[Event] = []
        assert until(lambda: events.extend(inbox.get(0.01)) or not end.ring.waiting)
        end.offer(encoded(made.next()), 400)
        assert until(lambda: events.extend(inbox.get(0.01)) or any(isinstance(e, Rows) and e.reached == 400 for e in events))
        end.close()
        events += take(inbox, lambda e: bool(of(Left, e)))
    assert of(Left, events)[0].how == "bye"
    rows, gaps = of(Rows, events), of(Gap, events)
    missed = sum(g.last - g.first + 1 for g in gaps)
    assert sum(r.reached is not None for r in rows) + missed == 401
    assert missed >= end.ring.dropped_flushes  # more where the connection was lost, too, on a machine that stands still
    assert sum(g.rows for g in gaps) == end.dropped
    assert server.stats().refused == {}


# -- peers that are none of ours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.0\r\n\r\n" + bytes(200), "not a frame"),
        (frames.encode(Proof(bytes(32), bytes(32), "rank")), "wrong token"),
        (frames.encode(Proof(bytes(32), bytes(32), "king")), "no proof"),
        (frames.encode(hello()), "no proof"),
        (frames.HEAD.pack(b"PRF1", 2, 0, 0, 0, 0, 1 << 30, 0), "oversize"),
    ],
)
def test_who_does_not_know_the_token_is_cut_off_and_counted(tmp_path: Path, data: bytes, reason: str) -> None:
    with serving(tmp_path) as (server, inbox):
        stranger = connect(parse_address(f"unix:{tmp_path}/live/sock"), 5.0)
        stranger.sendall(data)
        assert until(lambda: server.stats().refused == {reason: 1})
        assert server.stats().connections == 0
        good = Peer(tmp_path)
        good.say(hello())
        assert of(Joined, take(inbox, lambda e: bool(e)))


def test_a_proof_cannot_be_said_again(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        token = read_token(tmp_path / "token")
        heard = connect(parse_address(server.addresses[0]), 5.0)
        (frame,) = frames.Decoder().feed(heard.recv(4096))
        challenge = frame.message()
        assert isinstance(challenge, Challenge)
        nonce = bytes(32)
        proof = Proof(nonce, peer.peer_proof(token, challenge.nonce, nonce, "rank"), "rank")
        another = connect(parse_address(server.addresses[0]), 5.0)
        another.recv(4096)
        another.sendall(frames.encode(proof))
        assert until(lambda: server.stats().refused == {"wrong token": 1})


def test_a_process_does_not_talk_to_a_verifier_of_another_job(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        mine = make_token(tmp_path / "other")
        sock = connect(parse_address(server.addresses[0]), 5.0)
        with pytest.raises((TransportError, ConnectionError)):
            prove(sock, mine, "rank", 5.0)


def test_slow_and_unfinished_peers_are_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(handshake_s=0.2, frame_s=0.2)) as (server, _):
        slow = connect(parse_address(server.addresses[0]), 5.0)
        slow.sendall(b"PR")
        half = Peer(tmp_path)
        half.say(hello())
        half.socket.sendall(frames.encode(frames.Ping(), number=1)[:10])
        assert until(lambda: server.stats().refused == {"no proof in time": 1, "unfinished frame": 1})


def test_connections_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(connections=3)) as (server, _):
        held = [Peer(tmp_path) for _ in range(3)]
        more = connect(parse_address(server.addresses[0]), 5.0)
        assert more.recv(10) == b""
        assert server.stats().refused == {"too many connections": 1}
        held[0].socket.close()
        assert until(lambda: server.stats().connections == 2)
        assert Peer(tmp_path)


@pytest.mark.parametrize("way", ["before hello", "twice", "number", "backwards", "damaged", "again", "channel"])
def test_a_peer_that_breaks_a_rule_is_cut_off_and_what_it_said_before_stays(tmp_path: Path, way: str) -> None:
    with serving(tmp_path) as (server, inbox):
        bad, made = Peer(tmp_path), Made()
        if way != "before hello":
            bad.say(hello())
        if way == "twice":
            bad.say(hello())
        elif way == "number":
            bad.numbers[0] = 7
            bad.flush(0, made)
        elif way == "channel":
            bad.say(hello(name="1-1"), channel=1)
        elif way == "again":
            rows, sizes, body = frames.pack(encoded(made.next()))
            bad.say(Flush(0, 0, (0,) * 5, rows, sizes, again=True), body)
        else:
            bad.flush(0, made)
            if way == "backwards":
                bad.flush(4, Made())
            elif way == "damaged":
                bad.say(Flush(1, 1, (0,) * 5, (1,) * 5, (0,) * 5))
        assert until(lambda: sum(server.stats().refused.values()) == 1), server.stats().refused
        assert bad.cut_off()
        assert server.stats().connections == 0
        assert len(of(Rows, inbox.get(0))) == (way in ("backwards", "damaged"))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_kill_the_server(shared: tuple[Path, Server, Inbox], data: st.DataObject) -> None:
    folder, server, inbox = shared
    stream = bytearray()
    made = Made()
    for n in range(data.draw(st.integers(1, 3))):
        at = tuple(made.at[t] for t in frames.ORDER)
        rows, sizes, body = frames.pack(encoded(made.next(calls=3, names=1)))
        stream += frames.encode(Flush(n, n, at, rows, sizes), number=n + 1, body=body)
    for _ in range(data.draw(st.integers(0, 5))):
        at_ = data.draw(st.integers(0, len(stream) - 1))
        stream[at_] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        stream = stream[: data.draw(st.integers(0, len(stream)))]
    fuzzer = Peer(folder)
    fuzzer.say(hello(start=os.urandom(8).hex()))
    fuzzer.socket.sendall(bytes(stream))
    fuzzer.socket.close()
    while len(inbox):
        for event in inbox.get(0):
            if isinstance(event, Rows):
                assert all(rows.validate(full=True) is None for rows in event.records.values())
    assert server._thread.is_alive()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(folder) as (server, inbox):
        yield folder, server, inbox
        good = Peer(folder)
        good.say(hello(name="7-7"))
        assert good.hear().message() == Welcome(-1)


# -- addresses, tokens, folders -----------------------------------------------------------------------------------------


def test_addresses() -> None:
    assert parse_address("unix:/a/b") == Address(path="/a/b")
    assert parse_address("tcp:node:70") == Address(host="node", port=70)
    assert parse_address("tcp:[::1]:70") == Address(host="::1", port=70)
    assert str(parse_address("tcp:[::1]:70")) == "tcp:[::1]:70"
    for wrong in ("", "unix:", "tcp:70", "tcp:h:99999", "tcp:h:x", "http://h:1", "unix:/a\0b"):
        with pytest.raises(TransportError):
            parse_address(wrong)


def test_a_run_directory_of_any_length_can_be_listened_in(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with serving(deep) as (_, inbox):
        end = sender(deep)
        end.start()
        assert take(inbox, lambda e: bool(e))
        end.close()
    assert not (deep / "live" / "sock").exists()


def test_tcp_works_and_the_token_does_not_cross_the_wire(tmp_path: Path) -> None:
    with serving(tmp_path, address="tcp:127.0.0.1:0") as (server, inbox):
        end = sender(tmp_path, address=server.addresses[0])
        end.start()
        assert of(Joined, take(inbox, lambda e: bool(e)))
        end.close()


def test_a_socket_is_its_owner_s_alone(tmp_path: Path) -> None:
    with serving(tmp_path):
        assert (tmp_path / "live").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "live" / "sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(TransportError, match="already"), serving(tmp_path):
            pass
    (tmp_path / "live").chmod(0o755)
    with pytest.raises(TransportError, match="alone"), serving(tmp_path):
        pass


def test_a_dead_verifier_s_socket_is_replaced_but_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "live" / "sock"))
    dead.close()
    with serving(tmp_path):
        pass
    (tmp_path / "live" / "sock").write_text("mine")
    with pytest.raises(TransportError, match="no socket"), serving(tmp_path):
        pass


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(TransportError, match="others"):
        read_token(tmp_path / "token")
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(TransportError, match="bytes"):
        read_token(tmp_path / "short")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_cut_off_even_with_the_token(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        for folder in (tmp_path / "live", tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
                folder.chmod(folder.stat().st_mode | 0o011)
        (tmp_path / "live" / "sock").chmod(0o666)
        code = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "try:\n  sys.exit(s.recv(10) != b'')\nexcept ConnectionResetError:\n  pass"
        )
        assert subprocess.run([sys.executable, "-c", code, f"{tmp_path}/live/sock"], check=False).returncode == 0
        assert server.stats().refused == {"another user": 1}
