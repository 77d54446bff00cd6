"""Many processes of a host, one connection to the verifier: `proctor verify --relay UPSTREAM --listen unix:…`.

    with Relay(["unix:/run/dir/live/sock"], "tcp:node0:7077", token) as relay:
        …

A relay reads only heads of frames and gives each process a channel of its own. It holds up to `STORE_BYTES` that the verifier
does not take, then stops reading: the ranks' rings hold the rest. It remembers nothing else. When the verifier is gone it hangs
up on everybody and on who comes until the verifier is back; each process then learns from the verifier itself what it has.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from proctor.errors import ProctorError
from proctor.invariants.wire import frames, peer
from proctor.invariants.wire.frames import Bye, Decoder, Frame, FrameError, Hello, Ping
from proctor.verify.transport.endpoint import Connection, Endpoint, Limits

STORE_BYTES: Final = 16 << 20
_CONNECT_S: Final = 5.0
_RETRY_S: Final = (0.05, 5.0)
_FINISH_S: Final = 2.0
_HELLO, _BYE, _PING = (frames.kind_of(kind) for kind in (Hello, Bye, Ping))


class Relay(Endpoint):
    """Carries the frames of local processes to a verifier and back.

    Args:
        listen: addresses for the processes.
        upstream: address of the verifier, or of another relay.
        token: of the job, here and there.
    """

    def __init__(
        self,
        listen: Sequence[str],
        upstream: str,
        token: bytes,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(listen, token, limits=limits, now=now)
        self.upstream = peer.parse_address(upstream)
        self.problem = ""
        """Why the verifier cannot be reached; "" while it is."""
        self._up: Connection | None = None
        self._lost = threading.Event()
        self._over = threading.Event()
        self._next = 1
        self._ups: dict[tuple[Connection, int], int] = {}
        self._downs: dict[int, tuple[Connection, int]] = {}
        self._connector = threading.Thread(target=self._connect_for_ever, name="proctor-relay", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        super().start()
        self._connector.start()

    def close(self, timeout_s: float = 5.0) -> None:
        self._over.set()
        self._lost.set()
        super().close(timeout_s)

    @property
    def connected(self) -> bool:
        return self._up is not None

    # -- upstream -------------------------------------------------------------------------------------------------------

    def _connect_for_ever(self) -> None:
        pause, chance = _RETRY_S[0], random.Random()
        while not self._over.is_set():
            sock: socket.socket | None = None
            try:
                sock = peer.connect(self.upstream, _CONNECT_S)
                decoder = peer.prove(sock, self._token, "relay", _CONNECT_S)
            except (OSError, ProctorError) as e:
                self.problem = str(e)
                if sock is not None:
                    sock.close()
            else:
                self._lost.clear()
                self.call(lambda sock=sock, decoder=decoder: self._attach(sock, decoder))  # type: ignore[misc]
                began = time.monotonic()
                self._lost.wait()
                pause = _RETRY_S[0] if time.monotonic() - began > 1.0 else pause
            self._over.wait(pause * chance.uniform(0.5, 1.0))
            pause = min(2 * pause, _RETRY_S[1])

    def _attach(self, sock: socket.socket, decoder: Decoder) -> None:
        connection = self.adopt(sock, self.upstream.local)
        connection.role, connection.decoder = "verifier", decoder
        self._up, self._next, self.problem = connection, 1, ""

    def urgent(self, connection: Connection) -> bool:
        return connection is self._up

    def blocked(self) -> bool:
        return self._up is not None and len(self._up.out) > STORE_BYTES

    def finish(self) -> None:
        """Carry what the processes have said, and wait until the verifier has taken it: TCP drops what is on its way to it otherwise."""
        until = time.monotonic() + _FINISH_S
        while self._up is not None and self.serve(0.0, self.blocked()) and time.monotonic() < until:
            pass
        while self._up is not None and time.monotonic() < until:
            if not self._up.out:
                with contextlib.suppress(OSError):
                    self._up.socket.shutdown(socket.SHUT_WR)
            self.serve(_FINISH_S / 100, self.blocked())

    # -- frames ---------------------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if self._up is None:
            self.hang_up(connection)

    def heard(self, connection: Connection, frame: Frame) -> None:
        if frame.kind == _PING:
            return
        if connection is self._up:
            self._down(frame)
        elif self._up is not None:
            self._carry(self._up, connection, frame)

    def _down(self, frame: Frame) -> None:
        there = self._downs.get(frame.channel)
        if there is not None:
            self._pass(*there, frame)
            if frame.kind == _BYE:
                self._forget(*there)
                if there[0].role == "rank":
                    self.hang_up(there[0])
        elif frame.kind == _BYE and not frame.channel and self._up is not None:
            self.hang_up(self._up)

    def _carry(self, up: Connection, connection: Connection, frame: Frame) -> None:
        channel = self._ups.get((connection, frame.channel))
        if channel is None:
            if frame.kind == _BYE:
                return
            if frame.kind != _HELLO:
                raise FrameError("unexpected message", "before hello")
            channel, self._next = self._next, self._next + 1
            self._ups[connection, frame.channel] = channel
            self._downs[channel] = connection, frame.channel
        self._pass(up, channel, frame)
        if frame.kind == _BYE:
            self._forget(connection, frame.channel)

    def _pass(self, connection: Connection, channel: int, frame: Frame) -> None:
        number = connection.numbers.get(channel, 0)
        connection.numbers[channel] = number + 1
        self.push(connection, frame.to(channel, number))

    def _forget(self, connection: Connection, channel: int) -> int | None:
        up = self._ups.pop((connection, channel), None)
        if up is not None:
            del self._downs[up]
        return up

    def closed(self, connection: Connection, how: str) -> None:
        if connection is self._up:
            self._up = None
            self._ups.clear()
            self._downs.clear()
            for other in list(self._connections):
                self.hang_up(other)
            self._lost.set()
            return
        for channel in connection.expected:
            up = self._forget(connection, channel)
            if up is not None and self._up is not None:
                with contextlib.suppress(OSError):
                    self.say(self._up, Bye("timeout" if how == "timeout" else "eof"), up)
