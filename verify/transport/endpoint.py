"""Listening sockets and their connections, in one thread that waits for none of them.

Every connection proves that it knows the token before anything else of it is read (`peer`), under limits of its own: 512
bytes and a few seconds for the proof, one frame of bounded size afterwards. A peer that breaks a rule is cut off and counted by
the reason. While `blocked()` nothing is read, so that peers notice; they are not blamed for a silence that was ours.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from proctor.errors import TransportError
from proctor.invariants.wire import frames, peer
from proctor.invariants.wire.frames import (
    Accepted,
    Challenge,
    Frame,
    FrameError,
    Message,
    Ping,
    Proof,
)
from proctor.invariants.wire.peer import Address
from proctor.verify.transport.connection import Connection as Connection
from proctor.verify.transport.connection import Limits as Limits

_READ: Final = 256 << 10
_TICK_S: Final = 0.5
_BLOCKED_S: Final = 0.02


# More than 25 methods: five are for its two kinds to fill, and all the rest share one thread and one table of connections.
class Endpoint:
    """Accepts peers; subclasses say what their frames mean.

    Args:
        listen: addresses; port 0 takes a free one, see `addresses`.
        token: that peers must know.
        now: monotonic seconds.
    """

    def __init__(
        self, listen: Sequence[str], token: bytes, *, limits: Limits | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        if len(token) < peer.MIN_TOKEN:
            raise TransportError(f"a token has at least {peer.MIN_TOKEN} bytes, this one {len(token)}")
        self.refused: Counter[str] = Counter()
        """Peers that were cut off, by reason."""
        self.frames = self.bytes = 0
        self.limits = limits or Limits()
        self.addresses: list[str] = []
        self._listen, self._token, self._clock = [peer.parse_address(text) for text in listen], token, now
        self._unread = 0.0  # seconds in which we did not read, so nobody is to blame for a silence
        self._selector = selectors.DefaultSelector()
        self._sockets: list[tuple[socket.socket, Address]] = []
        self._connections: set[Connection] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="proctor-server", daemon=True)

    # -- what a subclass says -----------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """A peer has proved itself."""

    def heard(self, connection: Connection, frame: Frame) -> None:
        """A frame came, in order; may raise FrameError to cut the peer off."""

    def closed(self, connection: Connection, how: str) -> None:
        """A peer that had proved itself is gone: `eof`, `timeout`, or refused (`bad`)."""

    def blocked(self) -> bool:
        """Whether nothing may be read now."""
        return False

    def tick(self, now: float) -> None:
        """Twice a second."""

    def finish(self) -> None:
        """Last of all, before everybody is told goodbye."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen and serve.

        Raises:
            TransportError: an address cannot be listened at.
        """
        _raise_file_limit(self.limits.connections + 256)
        try:
            for address in self._listen:
                sock = peer.listen(address)
                if not address.local:
                    address = Address(host=address.host, port=sock.getsockname()[1])
                sock.setblocking(False)
                self._sockets.append((sock, address))
                self._selector.register(sock, selectors.EVENT_READ, address)
                self.addresses.append(str(address))
        except TransportError:
            self._close_sockets()
            raise
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Say goodbye to everybody and stop; safe to call twice."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def call(self, function: Callable[[], None]) -> None:
        """Run this in the endpoint's thread, soon; from any thread."""
        self._calls.append(function)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    @property
    def connections(self) -> int:
        return len(self._connections)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds, without those in which we did not read."""
        return self._clock() - self._unread

    def _run(self) -> None:
        last = ticked = self._clock()
        while not self._stopping:
            blocked = self.blocked()
            self.serve(_TICK_S, blocked)
            clock = self._clock()
            passed, last = clock - last, clock
            # Longer than any wait of ours: this process was stopped, or busy.
            self._unread += passed if blocked else max(0.0, passed - 2 * _TICK_S)
            if clock - ticked >= _TICK_S:
                ticked = clock
                self._check(clock)
                self.tick(self.now())
        self.finish()
        for connection in list(self._connections):
            if connection.role:
                self.say(connection, frames.Bye("closing"))
            self._drop(connection, "eof")
        self._close_sockets()
        self._selector.close()
        os.close(self._wake_fd)

    def serve(self, wait_s: float, blocked: bool) -> bool:
        """Serve whoever is ready, waiting for this long at most; whether anybody was."""
        events = self._blocked_events() if blocked else self._events(wait_s)
        for fd, address, connection, readable in events:
            if fd == self._wake_fd:
                self._woken()
            elif connection is None:
                self._accept(fd, address)
            else:
                self._serve(connection, readable)
        return bool(events)

    def _events(self, wait_s: float) -> list[tuple[int, Address | None, Connection | None, bool]]:
        found = []
        for key, mask in self._selector.select(wait_s):
            connection = key.data if isinstance(key.data, Connection) else None
            address = key.data if isinstance(key.data, Address) else None
            found.append((key.fd, address, connection, bool(mask & selectors.EVENT_READ)))
        return found

    def _blocked_events(self) -> list[tuple[int, Address | None, Connection | None, bool]]:
        """What must go on while nothing is read from peers: waking, sending, and the links of `urgent`."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        served = {c.socket.fileno(): c for c in self._connections if c.out or self.urgent(c)}
        for fd, connection in served.items():
            urgent = select.POLLIN if self.urgent(connection) else 0
            poll.register(fd, urgent | (select.POLLOUT if connection.out else 0))
        return [
            (fd, None, served.get(fd), bool(mask & select.POLLIN)) for fd, mask in poll.poll(_BLOCKED_S * 1000)
        ]

    def urgent(self, connection: Connection) -> bool:
        """Whether this connection is read even while others are not."""
        return False

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._calls:
            self._calls.popleft()()

    def _accept(self, fd: int, address: Address | None) -> None:
        listening = next(sock for sock, _ in self._sockets if sock.fileno() == fd)
        for _ in range(64):
            try:
                sock, _peer = listening.accept()
            except BlockingIOError:
                return
            except OSError:
                self.refused["no descriptors"] += 1
                time.sleep(0.01)  # the listening socket stays readable
                return
            local = address is not None and address.local
            if len(self._connections) >= self.limits.connections:
                self.refused["too many connections"] += 1
                sock.close()
                continue
            try:
                stranger = local and not peer.same_user(sock)
                if not local:
                    peer.tune(sock)
            except OSError:
                sock.close()
                continue
            if stranger:
                self.refused["another user"] += 1
                sock.close()
                continue
            connection = self.adopt(sock, local)
            self.say(connection, Challenge(connection.challenge))

    def adopt(self, sock: socket.socket, local: bool) -> Connection:
        """Serve this socket too."""
        sock.setblocking(False)
        connection = Connection(sock, local, self.now())
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _serve(self, connection: Connection, readable: bool) -> None:
        if connection.closed:
            return
        try:
            if connection.out:
                self._send(connection)
            if readable and not connection.closed:
                data = connection.socket.recv(_READ)
                if not data:
                    self._drop(connection, "eof")
                    return
                self._received(connection, data)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection, "eof")

    def _received(self, connection: Connection, data: bytes) -> None:
        """Bytes of a peer."""
        now = self.now()
        connection.heard = now
        self.bytes += len(data)
        try:
            connection.decoder.put(data)
            while not connection.closed and (frame := connection.decoder.next()) is not None:
                connection.begun = None
                self._frame(connection, frame)
        except FrameError as e:
            self.refuse(connection, e.reason)
            return
        if not connection.decoder.pending:
            connection.begun = None
        elif connection.begun is None:
            connection.begun = now

    def _frame(self, connection: Connection, frame: Frame) -> None:
        if not connection.role:
            self._prove(connection, frame)
            return
        expected = connection.expected.get(frame.channel, 0)
        if frame.number != expected:
            raise FrameError("frames out of order", f"{frame.number} instead of {expected}")
        if not expected and len(connection.expected) >= 1 << 16:
            raise FrameError("too many channels")
        connection.expected[frame.channel] = expected + 1 & 0xFFFFFFFF
        self.frames += 1
        self.heard(connection, frame)

    def _prove(self, connection: Connection, frame: Frame) -> None:
        proof = frame.message()
        if not isinstance(proof, Proof) or proof.role not in ("rank", "relay"):
            raise FrameError("no proof")
        if not peer.proves(self._token, connection.challenge, proof):
            raise FrameError("wrong token")
        connection.role = proof.role
        connection.decoder.allow()
        self.say(connection, Accepted(peer.verifier_proof(self._token, proof.nonce, connection.challenge)))
        connection.numbers.clear()
        self.opened(connection)

    # -- sending and closing --------------------------------------------------------------------------------------------

    def say(self, connection: Connection, message: Message, channel: int = 0) -> None:
        """Send a message, when the peer takes it."""
        number = connection.numbers.get(channel, 0)
        connection.numbers[channel] = number + 1
        self.push(connection, frames.encode(message, channel=channel, number=number))

    def push(self, connection: Connection, data: bytes) -> None:
        """Send the bytes of a frame."""
        if connection.closed or connection.deaf:
            return
        connection.out += data
        if len(connection.out) > self.limits.out_bytes and not self.urgent(connection):
            self.refuse(connection, "does not read")
            return
        if not connection.writing:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        try:
            with memoryview(connection.out) as view, view[:_READ] as chunk:
                count = connection.socket.send(chunk, socket.MSG_NOSIGNAL)
            del connection.out[:count]
        except BlockingIOError:
            pass
        except OSError:  # it has closed: its last words may lie here unread, and reading tells when they end
            connection.deaf = True
            connection.out.clear()
        writing = bool(connection.out)
        if writing != connection.writing:
            connection.writing = writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(connection.socket, events, connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """Cut a peer off and count it."""
        if not connection.closed:
            self.refused[reason] += 1
            self._drop(connection, "bad")

    def _drop(self, connection: Connection, how: str) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.role:
            self.closed(connection, how)

    def hang_up(self, connection: Connection) -> None:
        """Close a connection that has done nothing wrong."""
        self._drop(connection, "eof")

    def _check(self, clock: float) -> None:
        now, limits = self.now(), self.limits
        for connection in list(self._connections):
            if not connection.role:
                if now - connection.opened > limits.handshake_s:
                    self.refuse(connection, "no proof in time")
            elif connection.begun is not None and now - connection.begun > limits.frame_s:
                self.refuse(connection, "unfinished frame")
            elif now - connection.heard > limits.silent_s:
                self._drop(connection, "timeout")
            elif clock - connection.pinged > limits.ping_s and not connection.out:
                connection.pinged = clock
                self.say(connection, Ping())

    def _close_sockets(self) -> None:
        for sock, address in self._sockets:
            sock.close()
            if address.local:
                with contextlib.suppress(OSError):
                    os.unlink(address.path)
        self._sockets.clear()


def _raise_file_limit(wanted: int) -> None:
    """Let this process hold that many sockets, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
