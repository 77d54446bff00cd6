"""What a process or a relay says before it closes its connection arrives, whatever the other end is doing meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from helpers.live.transport import Rows as Made
from helpers.live.transport import encoded, sender, serving, take, until
from test_server import Peer, hello, of

from proctor.invariants.wire import peer
from proctor.invariants.wire.frames import Bye
from proctor.verify.transport.endpoint import Limits
from proctor.verify.transport.inbox import Inbox, Left, Rows
from proctor.verify.transport.relay import Relay

KINDS = pytest.mark.parametrize("address", ["", "tcp:127.0.0.1:0"], ids=["unix", "tcp"])
PINGING = Limits(ping_s=0.0)  # whenever the server looks at its connections


@KINDS
def test_a_server_reads_what_a_peer_said_before_it_closed_although_it_cannot_answer_any_more(tmp_path: Path, address: str) -> None:
    with serving(tmp_path, grace_s=0.1, limits=PINGING, address=address) as (server, inbox):
        one, made, busy = Peer(tmp_path, address=server.addresses[0]), Made(), threading.Event()
        one.say(hello())
        one.hear()
        server.call(lambda: busy.wait(10) and None)
        for n in range(4):
            one.flush(n, made)
        one.say(Bye())
        one.socket.close()
        time.sleep(0.6)  # it looks at its connections at once, before it reads
        busy.set()
        events = take(inbox, lambda e: bool(of(Left, e)))
    assert [e.how for e in of(Left, events)] == ["bye"]
    assert len(of(Rows, events)) == 4


@KINDS
def test_a_process_that_ends_while_the_verifier_is_slow_has_said_all(tmp_path: Path, address: str) -> None:
    inbox = Inbox(max_events=20)
    with serving(tmp_path, inbox, limits=PINGING, address=address) as (server, _):
        end, made = sender(tmp_path, address=server.addresses[0]), Made()
        end.start()
        assert until(lambda: end.connected)
        for step in range(60):
            end.offer(encoded(made.next(calls=500)), step)
        assert until(lambda: not address or not end.ring.waiting)
        closing = threading.Thread(target=end.close)
        closing.start()
        time.sleep(0.7)
        events = take(inbox, lambda e: bool(of(Left, e)))
        closing.join()
    assert [e.how for e in of(Left, events)] == ["bye"]
    assert len(of(Rows, events)) == 60


@KINDS
def test_a_relay_that_ends_passes_on_what_it_holds(tmp_path: Path, address: str) -> None:
    inbox = Inbox(max_events=20)
    with serving(tmp_path, inbox, address=address) as (server, _):
        relay = Relay([f"unix:{tmp_path}/relay/sock"], server.addresses[0], peer.read_token(tmp_path / "token"))
        relay.start()
        assert until(lambda: relay.connected)
        end, made = sender(tmp_path, address=relay.addresses[0]), Made()
        end.start()
        assert until(lambda: end.connected)
        for step in range(60):
            end.offer(encoded(made.next(calls=1000)), step)
        assert until(lambda: not end.ring.waiting)
        end.close()
        closing = threading.Thread(target=relay.close)
        closing.start()
        time.sleep(0.3)
        events = take(inbox, lambda e: bool(of(Left, e)))
        closing.join()
    assert [e.how for e in of(Left, events)] == ["bye"]
    assert len(of(Rows, events)) == 60
