"""Where the processes of a job report to: frames come in, events go to the verifier's core (`inbox`).

    inbox = Inbox()
    with Server(["unix:/run/dir/live/sock", "tcp:0.0.0.0:7077"], read_token(path), inbox) as server:
        for event in inbox.get(timeout_s=1.0): …
        server.send("0-4711", Freeze(key, step))

What a process sent is known by the numbers of its flushes. A flush that is missing becomes a `Gap` before the next one is
told, so that a step is never judged on records of which some are missing without the core knowing. When the core is slow
nothing is read; the ranks' rings then drop, and say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from proctor.invariants.schema import TRACE_SCHEMA
from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import (
    ORDER,
    Bye,
    Flush,
    Frame,
    FrameError,
    Freeze,
    Glances,
    Hello,
    Info,
    Message,
    Ping,
    Welcome,
)
from proctor.verify.transport.endpoint import Connection, Endpoint, Limits
from proctor.verify.transport.inbox import Gap, Glanced, Inbox, Joined, Left, Rows, Told

MAX_PROCESSES: Final = 1 << 16  # of a job, its restarts included
GRACE_S: Final = 3.0  # in which a process whose connection broke may come back before the core hears of it
_KEPT_MESSAGES: Final = 8  # for a process that is not connected
_DOUBTFUL_S: Final = 10.0  # what was said so shortly before a connection broke may not have arrived, and is said again
_AGAIN: Final = frozenset({"names", "context"})


class Stats(msgspec.Struct, frozen=True):
    """What the server has seen so far.

    refused: peers cut off, by reason. waiting: events in the inbox. blocked_s: in which the core was too slow.
    """

    connections: int
    processes: int
    frames: int
    bytes: int
    rows: int
    gaps: int
    lost_flushes: int
    refused: dict[str, int]
    waiting: int
    blocked_s: float


class _Member:
    """One life of one process."""

    def __init__(self, key: str, hello: Hello) -> None:
        self.key, self.folder, self.start = key, hello.process, hello.start
        self.have = -1
        self.at = [0] * len(ORDER)
        self.connection: Connection | None = None
        self.channel = 0
        self.leaves: tuple[float, str] | None = None  # when, and how, if it does not come back
        self.left = False
        self.kept: list[Message] = []
        self.told: list[tuple[float, Message]] = []  # when, and what, on the present connection


class Server(Endpoint):
    """Takes the records of all processes of one job.

    Args:
        listen: addresses, see `peer.parse_address`.
        token: that peers must know.
        inbox: where events go.
        grace_s: in which a broken connection may come back unnoticed.
    """

    def __init__(
        self,
        listen: Sequence[str],
        token: bytes,
        inbox: Inbox,
        *,
        limits: Limits | None = None,
        grace_s: float = GRACE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(listen, token, limits=limits, now=now)
        self._inbox, self._grace_s = inbox, grace_s
        self._rows = self._gaps = self._lost = 0
        self._members: dict[str, _Member] = {}
        self._by_name: dict[str, _Member] = {}
        self._channels: dict[tuple[Connection, int], _Member] = {}
        self._muted: set[tuple[Connection, int]] = set()
        inbox.on_room = self.wake

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def send(self, process: str, message: Freeze) -> None:
        """Say something to a process, now or when it comes back; from any thread."""
        self.call(lambda: self._deliver(process, message))

    def heard_at(self) -> dict[str, float]:
        """When each process that is connected was heard last, be it a mere sign of life; by `now`, from any thread."""
        members = list(self._members.values())
        return {m.key: connection.heard for m in members if (connection := m.connection) is not None}

    def stats(self) -> Stats:
        """Numbers for the metrics page; from any thread."""
        return Stats(
            connections=self.connections,
            processes=len(self._members),
            frames=self.frames,
            bytes=self.bytes,
            rows=self._rows,
            gaps=self._gaps,
            lost_flushes=self._lost,
            refused=dict(self.refused),
            waiting=len(self._inbox),
            blocked_s=self._unread,
        )

    # -- the server's thread --------------------------------------------------------------------------------------------

    def blocked(self) -> bool:
        return self._inbox.full

    def heard(self, connection: Connection, frame: Frame) -> None:
        if connection.role != "relay" or not frame.channel:
            self._heard(connection, frame)
        elif (connection, frame.channel) not in self._muted:
            try:
                self._heard(connection, frame)
            except FrameError as e:  # one process's fault, not that of the relay
                self.refused[e.reason] += 1
                self._mute(connection, frame.channel)

    def _mute(self, connection: Connection, channel: int) -> None:
        self._muted.add((connection, channel))
        member = self._channels.get((connection, channel))
        if member is not None:
            self._leave(member, "eof")
        self.say(connection, Bye("refused"), channel)

    def _heard(self, connection: Connection, frame: Frame) -> None:
        message = frame.message()
        member = self._channels.get((connection, frame.channel))
        if isinstance(message, Flush) and member is not None:
            self._take(member, message, frame.body)
        elif isinstance(message, Ping):
            return
        elif isinstance(message, Hello) and member is None:
            self._join(connection, frame.channel, message)
        elif isinstance(message, Info) and member is not None:
            self._inbox.put(Told(member.key, message.info), 1024)
        elif isinstance(message, Glances) and member is not None:
            if any(at >= len(message.names) for _, at, _ in message.rows):
                raise FrameError("malformed message", "a piece without a name")
            self._inbox.put(Glanced(member.key, [(step, message.names[at], fp) for step, at, fp in message.rows]), 64 * len(message.rows))
        elif isinstance(message, Bye) and member is not None:
            self._leave(member, message.why if message.why in ("eof", "timeout") else "bye")
        elif not isinstance(message, Bye):
            raise FrameError("unexpected message", type(message).__name__)

    def closed(self, connection: Connection, how: str) -> None:
        for channel in connection.expected:
            self._muted.discard((connection, channel))
            member = self._channels.get((connection, channel))
            if member is not None:
                self._leave(member, "eof" if how == "bad" else how)

    def tick(self, now: float) -> None:
        for member in self._members.values():
            if member.leaves is not None and now >= member.leaves[0]:
                self._gone(member, member.leaves[1])

    def _join(self, connection: Connection, channel: int, hello: Hello) -> None:
        if hello.schema > TRACE_SCHEMA:
            raise FrameError("newer schema", str(hello.schema))
        if connection.role == "rank" and channel:
            raise FrameError("unexpected message", "a rank has one channel")
        member = self._by_name.get(hello.process)
        resumed = member is not None and member.start == hello.start
        if member is None or not resumed:
            if len(self._members) >= MAX_PROCESSES:
                raise FrameError("too many processes")
            if member is not None and not member.left:
                self._unlink(member)
                self._gone(member, "replaced")
            member = self._new_member(hello)
        elif member.connection is not None:
            self._unlink(member)
        member.connection, member.channel, member.leaves = connection, channel, None
        self._channels[connection, channel] = member
        if not resumed or member.left:
            member.left = False
            host = hello.host
            self._inbox.put(Joined(member.key, member.folder, host, hello.info, resumed), 4096)
        else:
            self._inbox.put(Told(member.key, hello.info), 1024)
        self.say(connection, Welcome(member.have), channel)
        for message in member.kept:
            self.say(connection, message, channel)
        member.kept.clear()

    def _new_member(self, hello: Hello) -> _Member:
        key, life = hello.process, 1
        while key in self._members:
            life += 1
            key = f"{hello.process}~{life}"
        member = self._members[key] = self._by_name[hello.process] = _Member(key, hello)
        return member

    def _take(self, member: _Member, flush: Flush, body: bytes) -> None:
        records = frames.unpack(flush, body)
        if flush.again:
            if not records.keys() <= _AGAIN:
                raise FrameError("malformed records", "only names and contexts are said again")
            self._inbox.put(Rows(member.key, records, None), len(body) + 256)
            return
        if flush.n <= member.have:
            return  # sent again, and here already
        if flush.n > member.have + 1:
            spans = {table: (a, b) for table, a, b in zip(ORDER, member.at, flush.at, strict=True)}
            if any(begin > end for begin, end in spans.values()):
                raise FrameError("malformed records", "rows that were numbered already")
            self._gaps += 1
            self._lost += flush.n - member.have - 1
            self._inbox.put(Gap(member.key, member.folder, member.have + 1, flush.n - 1, spans))
        elif list(flush.at) != member.at:
            raise FrameError("malformed records", "rows that do not follow the last ones")
        member.have = flush.n
        member.at = [a + n for a, n in zip(flush.at, flush.rows, strict=True)]
        self._rows += sum(flush.rows)
        self._inbox.put(Rows(member.key, records, flush.reached), len(body) + 256)

    def _deliver(self, process: str, message: Freeze) -> None:
        member = self._members.get(process)
        if member is None or member.left:
            return
        if member.connection is None:
            member.kept = [*member.kept, message][-_KEPT_MESSAGES:]
        else:
            self.say(member.connection, message, member.channel)
            member.told = [*member.told, (self.now(), message)][-_KEPT_MESSAGES:]

    def _leave(self, member: _Member, how: str) -> None:
        connection, channel = member.connection, member.channel
        member.connection = None
        if connection is not None:
            self._channels.pop((connection, channel), None)
        if how == "bye":
            self._gone(member, how)
        else:
            self._doubt(member)
            member.leaves = self.now() + self._grace_s, how

    def _doubt(self, member: _Member) -> None:
        """A connection broke: what was said on it last is said again when the process is back."""
        doubtful = [message for at, message in member.told if at > self.now() - _DOUBTFUL_S]
        member.kept, member.told = [*doubtful, *member.kept][-_KEPT_MESSAGES:], []

    def _gone(self, member: _Member, how: str) -> None:
        member.leaves, member.left = None, True
        self._inbox.put(Left(member.key, how))

    def _unlink(self, member: _Member) -> None:
        """A process has come on another connection: the old one is dead, whoever holds it."""
        old, channel, member.connection = member.connection, member.channel, None
        if old is None:
            return
        self._doubt(member)
        self._channels.pop((old, channel), None)
        if old.role == "rank":
            self.hang_up(old)
