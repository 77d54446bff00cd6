"""A detour over NATS, for sites whose nodes reach a message broker but not each other (extra `proctor[nats]`).

    node:      with Bridge.entrance("unix:/run/dir/nats/sock", "nats://broker:4222", "proctor.job42"): Relay([…], "unix:/run/dir/nats/sock", …)
    verifier:  with Bridge.exit("nats://broker:4222", "proctor.job42", "unix:/run/dir/live/sock"): Server(["unix:/run/dir/live/sock"], …)

Connections to the entrance come out at the exit, byte for byte, so that proofs, frames and resuming are those between a
process and the verifier: the broker is trusted with nothing but carrying. Chunks are numbered; when one is lost, or the
broker is, the connection breaks and is made anew. At most `WINDOW` bytes are on their way, so a slow verifier is felt.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import struct
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

from proctor.errors import TransportError
from proctor.invariants.wire import peer

WINDOW: Final = 2 << 20
_CHUNK: Final = 64 << 10  # NATS takes a mebibyte
_ACK_BYTES: Final = WINDOW // 8
_OPEN_S: Final = 5.0
_START_S: Final = 5.0
_MAX_TUNNELS: Final = 8192
_HEAD: Final = struct.Struct("<cQ")  # kind; number of a chunk, or bytes taken
_DATA, _TAKEN, _CLOSE, _OPEN = b"D", b"A", b"C", b"O"
_SUBJECT: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TUNNEL: Final = re.compile(rb"[0-9a-f]{32}")


class _Tunnel:
    """One connection, of which the other half is on the other side of the broker."""

    def __init__(self, nats: Any, out: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened = asyncio.Event()
        self.over = asyncio.Event()
        self._nats, self._out, self._reader, self._writer = nats, out, reader, writer
        self._sent = self._taken = self._chunks = 0
        self._expected = self._got = self._said = 0
        self._room = asyncio.Event()

    async def heard(self, message: Any) -> None:
        """A message of the other half."""
        data: bytes = message.data
        if self.over.is_set() or len(data) < _HEAD.size:
            return
        kind, number = _HEAD.unpack_from(data)
        if kind == _OPEN:
            self.opened.set()
        elif kind == _TAKEN and number <= self._sent:
            self._taken = max(self._taken, number)
            self._room.set()
        elif kind == _DATA and number == self._expected:
            self._expected += 1
            await self._deliver(data[_HEAD.size :])
        else:
            self.over.set()  # closed there, or a chunk is missing

    async def _deliver(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            self.over.set()
            return
        self._got += len(data)
        if self._got - self._said >= _ACK_BYTES:
            self._said = self._got
            await self.say(_TAKEN, self._got)

    async def say(self, kind: bytes, number: int = 0, data: bytes = b"") -> None:
        await self._nats.publish(self._out, _HEAD.pack(kind, number) + data)

    async def run(self) -> None:
        """Carry bytes until either half is done."""
        ends = [asyncio.ensure_future(self._pump()), asyncio.ensure_future(self.over.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            self.over.set()
            with contextlib.suppress(Exception):
                await self.say(_CLOSE)
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _pump(self) -> None:
        while data := await self._reader.read(_CHUNK):
            while self._sent - self._taken >= WINDOW:
                self._room.clear()
                await self._room.wait()
            self._sent += len(data)
            await self.say(_DATA, self._chunks, data)
            self._chunks += 1


class Bridge:
    """One end of the detour, in a thread of its own. Made by `entrance` or `exit`.

    Args:
        servers: URL of the broker, with user and password or token where it wants them.
        subject: under which this job's messages run; the same at both ends.
    """

    def __init__(self, servers: str, subject: str, work: Callable[[Bridge, Any], Awaitable[None]]) -> None:
        if not _SUBJECT.fullmatch(subject):
            raise TransportError(f"{subject!r} is no NATS subject", hint="words of letters, digits, - and _ between dots")
        self.tunnels = 0
        self._servers, self._subject, self._work = servers, subject, work
        self._open: set[_Tunnel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="proctor-nats", daemon=True)

    @classmethod
    def entrance(cls, listen: str, servers: str, subject: str) -> Bridge:
        """Accept connections here that come out at the exit."""
        address = peer.parse_address(listen)

        async def work(self: Bridge, nats: Any) -> None:
            sock = peer.listen(address)
            sock.setblocking(False)
            make = asyncio.start_unix_server if address.local else asyncio.start_server
            server = await make(lambda r, w: self._enter(nats, r, w), sock=sock)
            async with server:
                await self._until_stopped()

        return cls(servers, subject, work)

    @classmethod
    def exit(cls, servers: str, subject: str, verifier: str) -> Bridge:
        """Let connections out, to a verifier."""
        address = peer.parse_address(verifier)

        async def work(self: Bridge, nats: Any) -> None:
            async def asked(message: Any) -> None:
                if _TUNNEL.fullmatch(message.data) and len(self._open) < _MAX_TUNNELS:
                    task = asyncio.ensure_future(self._leave(nats, message.data.decode(), address))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

            await nats.subscribe(f"{self._subject}.open", queue="verifier", cb=asked)
            await nats.flush()
            await self._until_stopped()

        return cls(servers, subject, work)

    # -- life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect to the broker.

        Raises:
            TransportError: nats-py is not installed, or the broker cannot be reached, or the address not be listened at.
        """
        self._thread.start()
        if not self._ready.wait(_START_S + 2.0) or self._problem is not None:
            why = type(self._problem).__name__ if self._problem else "no answer in time"
            if isinstance(self._problem, TransportError):
                raise self._problem
            raise TransportError(f"the NATS bridge cannot start: {why}", hint="pip install 'proctor[nats]', and see that the broker runs")

    def close(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        if self._thread.is_alive():
            self._thread.join(5.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as e:  # noqa: BLE001  told by `start`, or at the log of the one who closes
            self._problem = e
        finally:
            self._ready.set()

    async def _main(self) -> None:
        import nats

        async def broken() -> None:
            for tunnel in self._open:
                tunnel.over.set()

        async def failed(error: Exception) -> None:
            """nats-py would print it."""

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connecting = nats.connect(
            self._servers, disconnected_cb=broken, error_cb=failed, max_reconnect_attempts=-1, reconnect_time_wait=0.5
        )
        client = await asyncio.wait_for(connecting, _START_S)
        try:
            await self._work(self, client)
        finally:
            await broken()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await client.close()

    async def _until_stopped(self) -> None:
        self._ready.set()
        assert self._stop is not None
        await self._stop.wait()

    # -- tunnels --------------------------------------------------------------------------------------------------------

    async def _enter(self, nats: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = secrets.token_hex(16)
        tunnel = _Tunnel(nats, f"{self._subject}.{name}.up", reader, writer)
        await self._serve(nats, tunnel, f"{self._subject}.{name}.down", name)

    async def _leave(self, nats: Any, name: str, address: peer.Address) -> None:
        try:
            sock = await asyncio.to_thread(peer.connect, address, _OPEN_S)
        except (OSError, TransportError):
            return  # the entrance gives up in a moment, and its peer tries again
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        tunnel = _Tunnel(nats, f"{self._subject}.{name}.down", reader, writer)
        await self._serve(nats, tunnel, f"{self._subject}.{name}.up", "")

    async def _serve(self, nats: Any, tunnel: _Tunnel, heard: str, ask: str) -> None:
        self._open.add(tunnel)
        self.tunnels += 1
        subscription = await nats.subscribe(heard, cb=tunnel.heard)
        try:
            if ask:
                await nats.publish(f"{self._subject}.open", ask.encode())
                await asyncio.wait_for(tunnel.opened.wait(), _OPEN_S)
            else:
                await nats.flush()
                await tunnel.say(_OPEN)
        except (TimeoutError, OSError):
            tunnel.over.set()
        try:
            await tunnel.run()
        finally:
            self._open.discard(tunnel)
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()
