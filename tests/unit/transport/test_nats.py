"""A detour over a real NATS broker: what comes in at the entrance comes out at the exit, or the connection breaks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.live.transport import Rows as Made
from helpers.live.transport import encoded, sender, serving, take, until

from benchmarks.faults.outside import Lossy
from proctor.errors import TransportError
from proctor.invariants.wire.peer import read_token
from proctor.verify.transport.inbox import Event, Gap, Left, Rows
from proctor.verify.transport.nats import Bridge
from proctor.verify.transport.relay import Relay

SERVER = shutil.which("nats-server")


def _start(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([str(SERVER), "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    assert until(listens)
    return process


@pytest.fixture
def broker() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("nats")
    if SERVER is None:
        pytest.skip("needs nats-server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = _start(port)
    yield f"nats://127.0.0.1:{port}", process
    process.kill()
    process.wait(10)


def flushes(events: list[Event]) -> list[int | None]:
    return [e.reached for e in events if isinstance(e, Rows) and e.reached is not None]


def test_processes_reach_the_verifier_over_the_broker(tmp_path: Path, broker: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = broker
    entrance = f"unix:{tmp_path}/nats/sock"
    with serving(tmp_path) as (server, inbox), Bridge.exit(url, "proctor.job1", server.addresses[0]), \
            Bridge.entrance(entrance, url, "proctor.job1"), \
            Relay([f"unix:{tmp_path}/relay/sock"], entrance, read_token(tmp_path / "token")) as relay:  # fmt: skip
        assert until(lambda: relay.connected)
        end, made = sender(tmp_path, "0-1", relay.addresses[0]), Made()
        end.start()
        for step in range(60):
            end.offer(encoded(made.next(calls=2000)), step)  # 8 MB: more than the window
        events = take(inbox, lambda e: len(flushes(e)) == 60, 20)
        end.close()
        events += take(inbox, lambda e: any(isinstance(x, Left) for x in e))
    assert flushes(events) == list(range(60))
    assert not any(isinstance(e, Gap) for e in events)
    assert isinstance(events[-1], Left) and events[-1].how == "bye"


def test_a_broker_that_is_restarted_costs_nothing_that_is_kept(
    tmp_path: Path, broker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    url, process = broker
    entrance = f"unix:{tmp_path}/nats/sock"
    with serving(tmp_path, grace_s=20.0) as (server, inbox), Bridge.exit(url, "job", server.addresses[0]), \
            Bridge.entrance(entrance, url, "job"):  # fmt: skip
        end, made = sender(tmp_path, "0-1", entrance), Made()
        end.start()
        assert until(lambda: end.connected)
        for step in range(10):
            end.offer(encoded(made.next()), step)
        events = take(inbox, lambda e: len(flushes(e)) == 10)
        process.kill()
        process.wait(10)
        assert until(lambda: not end.connected)
        for step in range(10, 20):
            end.offer(encoded(made.next()), step)
        again = _start(int(url.rpartition(":")[2]))
        try:
            events += take(inbox, lambda e: len(flushes(e)) == 10, 20)
            assert flushes(events) == list(range(20))
            assert server.stats().refused == {}
            end.close()
        finally:
            again.kill()
            again.wait(10)


def test_what_cannot_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="subject"):
        Bridge.exit("nats://127.0.0.1:1", "a b > *", "unix:/nowhere")
    pytest.importorskip("nats")
    monkeypatch.setattr("proctor.verify.transport.nats._START_S", 0.5)
    began = time.monotonic()
    bridge = Bridge.exit("nats://127.0.0.1:1", "a", "unix:/nowhere")
    with pytest.raises(TransportError, match="cannot start"):
        bridge.start()
    assert time.monotonic() - began < 5


def test_connections_to_the_broker_that_break_lose_nothing(tmp_path: Path, broker: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = broker
    way, entrance = Lossy(("127.0.0.1", int(url.rpartition(":")[2])), 256 * 1024), f"unix:{tmp_path}/nats/sock"
    with serving(tmp_path, grace_s=30.0) as (server, inbox), Bridge.exit(url, "job", server.addresses[0]), \
            Bridge.entrance(entrance, f"nats://127.0.0.1:{way.port}", "job"):  # fmt: skip
        end, made = sender(tmp_path, "0-1", entrance), Made()
        end.start()
        assert until(lambda: end.connected)
        for step in range(40):
            end.offer(encoded(made.next(calls=400)), step)
            time.sleep(0.02)
        events = take(inbox, lambda e: len(flushes(e)) == 40, 40)
        end.close()
    assert flushes(events) == list(range(40)), "each once, in order"
    assert not any(isinstance(e, Gap) for e in events) and way.cuts >= 2
