"""Sends a process's records to the verifier while they go to disk; never makes the process wait.

Whoever drained records offers them, and sends them itself when the connection is idle (`Sender.offer`: the connection is not waited for,
no system call can block), which spares two changes of thread a flush; all else is said and heard by a daemon thread. Whatever happens
to the verifier (absent, dead, restarted, stopped, cut off), the ring fills, the newest records are dropped and counted, and the
verifier is told by the numbers of the flushes what it missed. Children of the process never touch the socket, and the program's
random state is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import select
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic  # our own: a program may put another clock into `time`
from typing import Any, Final

from proctor.errors import ProctorError
from proctor.instrument.guard import Guard, say
from proctor.instrument.own_thread import OwnThread
from proctor.instrument.record.ring import RING_BYTES, Entry, Ring
from proctor.invariants.descriptor import Bell, OwnSocket
from proctor.invariants.schema import TABLES
from proctor.invariants.wire import frames, peer
from proctor.invariants.wire.arrow_message import Encoded
from proctor.invariants.wire.frames import Bye, Decoder, Flush, Freeze, Glances, Hello, Info, Ping, Welcome

CLOSE_S: Final = 2.0  # the most that an exit waits for the verifier,
_ABSENT_S: Final = 0.5  # and for one that is not there
_CONNECT_S: Final = 2.0
_HANDSHAKE_S: Final = 5.0
_RETRY_S: Final = (0.05, 2.0)  # first and longest pause between two attempts
_PING_S: Final = 2.0  # of silence
_STALLED_S: Final = 20.0  # bytes that nobody takes
_SILENT_S: Final = 60.0  # a verifier that says nothing; it pings every 5 s
_CHUNK: Final = 256 << 10
_GLANCES_S: Final = 0.5  # between two times that they are sent
_PART_BYTES: Final = 8 << 20  # of records in one flush; more are offered in parts


class Sender:
    """The rank's end of a connection.

    Args:
        address: of the verifier or the relay, see `peer.parse_address`; nobody needs to listen there yet.
        token_file: of the job, read at every attempt.
        hello: the process's name (its folder under `RUN/procs`), host, and present `process.json`.
        on_freeze: called with key and step, from the sender's thread, when the verifier wants the last steps kept.
        ring_bytes: memory for what waits.
    """

    def __init__(
        self,
        address: str,
        token_file: Path,
        hello: Callable[[], tuple[str, str, dict[str, Any]]],
        guard: Guard,
        *,
        on_freeze: Callable[[str, int], None] | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self.address = peer.parse_address(address)
        self.ring = Ring(ring_bytes)
        self.connections = 0
        self.on_freeze = on_freeze
        self.glances: Callable[[], Glances | None] | None = None  # what was glanced at since the last time
        self._glanced = 0.0  # when they were sent
        self._token_file, self._hello, self._guard = token_file, hello, guard
        self._start = secrets.token_hex(8)
        self._retry = random.Random()  # its own: the program's random state is the program's
        self._at = dict.fromkeys(frames.ORDER, 0)
        self._blind = 0  # errors of ours that the verifier knows of
        self._n = 0
        self._reached = -1
        self._info: dict[str, Any] | None = None
        self._socket: OwnSocket | None = None
        self._link: _Link | None = None  # a connection that a verifier has welcomed
        self._turn = threading.Lock()  # to use it
        self._pid = os.getpid()
        self._frozen: deque[Freeze] = deque(maxlen=64)  # what the verifier asked for
        self._closing = threading.Event()
        self._deadline: float | None = None  # of closing
        self._said = ""
        self._bell = Bell()
        self._thread = OwnThread(self._run)
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (call := forked()) and call())

    # -- the process's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def thread(self) -> OwnThread:
        return self._thread

    @property
    def connected(self) -> bool:
        """Whether a verifier has welcomed us and the connection stands."""
        return self._link is not None

    @property
    def dropped(self) -> int:
        """Records that found no room."""
        return self.ring.dropped_rows

    def offer(self, batches: Mapping[str, Encoded], reached: int) -> bool:
        """Hand over records of some tables; never waits, never fails for want of a verifier.

        Args:
            batches: what the process let go of together.
            reached: the step that it was in: all before it are whole.

        Returns:
            False when any of them was dropped.
        """
        if os.getpid() != self._pid:
            return False
        taken = True
        for last, (rows, sizes, body) in _parts(batches):
            at = tuple(self._at[table] for table in frames.ORDER)
            for table, count in zip(frames.ORDER, rows):
                self._at[table] += count
            flush = Flush(self._n, reached if last else self._reached, at, rows, sizes)
            self._n += 1
            taken &= self.ring.put(Entry(flush, body))
        self._reached = max(reached, self._reached)
        if not self._push():
            self._wake()
        return taken

    def _push(self) -> bool:
        """Send what waits at once; False when the sender's thread does not know of something that is left for it."""
        held: list[bool] = []
        try:
            held.extend(map(self._turn.acquire, (False,)))  # one call: see `TraceWriter.step_ended`
            if not held[0] or self._closing.is_set():
                return False
            link = self._link
            if link is None or link.out:
                return True  # it looks when it has connected, and when the socket takes more
            self._fill(link)
            link.send()
            return not link.out
        except Exception:  # noqa: BLE001  the sender's thread meets it, too, and knows what to do
            return False
        finally:
            if held and held[0]:
                self._turn.release()

    def inform(self, info: dict[str, Any]) -> None:
        """The process's `process.json` has changed."""
        self._info = info
        self._wake()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits and say goodbye, in this time at most; safe to call twice."""
        if os.getpid() != self._pid:
            return
        self._deadline = monotonic() + (timeout_s if self.connected else min(timeout_s, _ABSENT_S))
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s + 0.2)

    def _wake(self) -> None:
        self._bell.ring()

    def _forked(self) -> None:
        """In a child: let go of the socket, so that the parent's end is its own."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    # -- the sender's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the program's
        self._guard.run("stream", self._connect_for_ever)

    def _connect_for_ever(self) -> None:
        pause = _RETRY_S[0]
        while not self._late():
            try:
                with peer.connect(self.address, _CONNECT_S) as sock:
                    self._socket = sock
                    decoder = peer.prove(sock, peer.read_token(self._token_file), "rank", _HANDSHAKE_S)
                    link = _Link(sock, decoder)
                    done = self._talk(link)
                    pause = _RETRY_S[0] if link.welcomed else pause
                    if done:
                        self._part(link)
                        return
            except OSError:
                pass  # nobody there, or not any more: expected
            except ProctorError as e:
                self._complain(str(e))
            finally:
                with self._turn:
                    self._socket = self._link = None
            if self._deadline is not None and not self.ring.waiting:
                return
            self._rest(pause * self._retry.uniform(0.5, 1.0))
            pause = min(2 * pause, _RETRY_S[1])

    def _complain(self, what: str) -> None:
        if what != self._said:
            self._said = what
            say(f"not streaming to {self.address}, will try again: {what}")

    def _late(self) -> bool:
        return self._deadline is not None and monotonic() >= self._deadline

    def _rest(self, pause_s: float) -> None:
        if self._closing.wait(pause_s):
            time.sleep(min(pause_s, _RETRY_S[0]))

    def _talk(self, link: _Link) -> bool:
        """Serve one connection until it ends; True when everything has been said.

        Raises:
            OSError, FrameError: the connection is over.
        """
        self._info = None  # first: what changes while we ask is news
        name, host, info = self._hello()
        link.say(Hello(name, host[:256], self._start, _plain(info)))
        leaving = False
        while True:
            with self._turn:
                link.check()
                if link.welcomed and not leaving and len(link.out) < _CHUNK:
                    self._fill(link)
                    if self._deadline is not None and not self.ring.waiting and self._info is None:
                        link.say(Bye())
                        leaving = True
                wanting = bool(link.out)
            if self._late() or (leaving and not wanting):
                return leaving and not wanting
            poll, bell = select.poll(), self._bell.fileno()  # anew: the program may have closed what we polled
            poll.register(bell, select.POLLIN)
            poll.register(link.socket, select.POLLIN | (select.POLLOUT if wanting else 0))
            for fd, event in poll.poll(link.wait_ms(self._deadline)):
                if fd == bell:
                    self._bell.clear()
                    continue
                with self._turn:
                    if event & select.POLLOUT:
                        link.send()
                    if event & (select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL):
                        for frame in link.receive():
                            self._heard(link, frame.message())

    def _part(self, link: _Link) -> None:
        """Wait until the verifier has taken all and hangs up: by TCP, what is on its way is lost when something comes to a closed socket."""
        if self.address.local:
            return
        with contextlib.suppress(OSError, ProctorError):
            link.socket.shutdown(socket.SHUT_WR)
            while not self._late():
                poll = select.poll()
                poll.register(link.socket, select.POLLIN)
                if poll.poll(link.wait_ms(self._deadline)):
                    link.receive()

    def _fill(self, link: _Link) -> None:
        """Give the connection more to send; that records end goes before those that lack them."""
        info = self._info
        if info is not None and len(info.get("blind", ())) > self._blind:
            self._blind, self._info = len(info["blind"]), None
            link.say(Info(_plain(info)))
        while len(link.out) < _CHUNK and (entries := self.ring.take()):
            for entry in entries:
                link.say(entry.flush, entry.body)
        info, self._info = self._info, None
        if info is not None:
            link.say(Info(_plain(info)))
        if self.glances is not None and time.monotonic() - self._glanced >= _GLANCES_S:
            self._glanced = time.monotonic()
            glances = self._guard.run("glance", self.glances)
            if glances is not None:
                link.say(glances)

    def _heard(self, link: _Link, message: frames.Message) -> None:
        if isinstance(message, Welcome) and not link.welcomed:
            self.ring.rewind(message.have)
            link.welcomed, self._link = True, link
            self._said = ""
            self.connections += 1
        elif isinstance(message, Freeze) and self.on_freeze is not None and message not in self._frozen:
            self._frozen.append(message)  # said again where a connection broke
            self._guard.run("freeze", self.on_freeze, message.key, message.step)
        elif isinstance(message, Bye):
            raise ConnectionResetError("the verifier said goodbye")


class _Link:
    """One connection: what is to be sent, and when something last happened."""

    def __init__(self, sock: OwnSocket, decoder: Decoder) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.out = bytearray()
        self.welcomed = False
        self._decoder = decoder
        self._number = 0
        self._sent = self._heard = monotonic()

    def say(self, message: frames.Message, body: list[bytes] | None = None) -> None:
        if not self.out:
            self._sent = monotonic()
        self.out += frames.encode(message, number=self._number, body=body or ())
        self._number += 1

    def send(self) -> None:
        with memoryview(self.out) as view, view[:_CHUNK] as chunk:
            try:
                count = self.socket.send(chunk, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
        del self.out[:count]
        self._sent = monotonic()

    def receive(self) -> list[frames.Frame]:
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the verifier closed the connection")
        self._heard = monotonic()
        return self._decoder.feed(data)

    def wait_ms(self, deadline: float | None) -> float:
        """How long nothing needs to happen."""
        until = self._sent + _PING_S if not self.out else monotonic() + _PING_S
        until = until if deadline is None else min(until, deadline)
        return max(0.0, until - monotonic()) * 1000 + 1

    def check(self) -> None:
        if not self.socket.is_ours():
            raise ConnectionResetError("the program closed our socket")
        now = monotonic()
        if self.out and now - self._sent > _STALLED_S:
            raise TimeoutError("the verifier takes nothing")
        if now - self._heard > _SILENT_S:
            raise TimeoutError("the verifier says nothing")
        if not self.out and now - self._sent >= _PING_S:
            self.say(Ping())


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """As it reads from `process.json`: torch's version is a class of its own, which msgpack does not take."""
    plain: dict[str, Any] = json.loads(json.dumps(info, default=str))
    return plain


_Packed = tuple[tuple[int, ...], tuple[int, ...], list[bytes]]


def _parts(batches: Mapping[str, Encoded]) -> list[tuple[bool, _Packed]]:
    """Records packed in parts that fit into a frame, and whether one is the last; names and contexts come before their use."""
    whole = frames.pack(batches)
    if _fits(whole):
        return [(True, whole)]
    parts: list[_Packed] = []
    for table in sorted(batches, key=lambda t: t not in ("names", "context")):
        parts += _pieces(table, batches[table])
    return [(i == len(parts) - 1, part) for i, part in enumerate(parts)]


def _pieces(table: str, batch: Encoded) -> list[_Packed]:
    packed = frames.pack({table: batch})
    if batch.rows <= 1 or _fits(packed):
        return [packed]
    rows, half = batch.batch(TABLES[table]), batch.rows // 2
    return [*_pieces(table, Encoded.of(rows.slice(0, half))), *_pieces(table, Encoded.of(rows.slice(half)))]


def _fits(packed: _Packed) -> bool:
    rows, sizes, _ = packed
    return sum(sizes) <= _PART_BYTES and max(rows) <= frames.MAX_ROWS
