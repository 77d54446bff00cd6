"""Descriptors that we keep inside somebody's program: each use is sure that the file behind the number is still ours.

A program may close descriptors that it did not open: a daemon closes all of them. The next file that it opens gets the lowest free
number, which may be one that we remember; what we write, send, cut or close there would then hit a checkpoint or a process group's socket.
Therefore our descriptors lie at high numbers, which the system gives out last, and device and inode are compared before every use.
A file is opened again by its path when its descriptor is gone; a socket or a pipe is not.

What remains: a program's other thread that closes our number and puts a file of its own exactly there (`dup2`) between the comparison
and the use, a microsecond later; and one that deletes our file, whose inode its own file at our number then gets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_HIGH: Final = 512  # or half of what a small limit allows
_MAKING: Final = os.O_CREAT | os.O_EXCL | os.O_TRUNC

Identity = tuple[int, int, int]  # device, inode, kind of file


def identity(number: int) -> Identity | None:
    """Which file is behind a descriptor; None when there is none."""
    try:
        return _of(os.fstat(number))
    except (OSError, OverflowError):
        return None


class Descriptor:
    """A file that is open for us, until it is closed.

    Args:
        path: of the file.
        flags: as for `os.open`.
        mode: of a new file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path | str, flags: int, mode: int = 0o666) -> None:
        self.path, self._flags = path, flags
        self._number, self._identity = self._open(flags, mode)

    def number(self) -> int:
        """For one use at once.

        Raises:
            OSError: the program closed it, and the path leads to this file no more.
        """
        if identity(self._number) != self._identity:
            self._number = -1  # whatever it is now, it is not ours
            number, found = self._open((self._flags & ~_MAKING) | os.O_NOFOLLOW, 0)
            if found != self._identity:
                os.close(number)
                raise OSError(errno.ESTALE, "the program closed it, and another file is in its place", str(self.path))
            self._number = number
        return self._number

    def write(self, data: Any, at: int) -> None:
        """Write all of it at this offset.

        Raises:
            OSError: not all of it could be written, or the file is not ours any more.
        """
        view = _bytes(data)
        while view:
            count = os.pwrite(self.number(), view[: 1 << 24], at)
            view, at = view[count:], at + count

    def append(self, data: Any) -> None:
        """Write it at the end of a file that was opened with `O_APPEND`.

        Raises:
            OSError: as for `write`.
        """
        view = _bytes(data)
        while view:
            view = view[os.write(self.number(), view) :]

    def close(self) -> None:
        """Let go of it; a number that is not ours any more is left alone."""
        number, self._number = self._number, -1
        if number >= 0 and identity(number) == self._identity:
            os.close(number)

    def _open(self, flags: int, mode: int) -> tuple[int, Identity]:
        number, found = _lift(os.open(self.path, flags | os.O_CLOEXEC, mode))
        if stat.S_ISREG(found[2]) and _of(os.stat(self.path)) != found:  # closed and taken between the two calls, or replaced
            os.close(number)
            raise OSError(errno.ESTALE, "the program closed it while it was opened", str(self.path))
        return number, found


@contextlib.contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o666) -> Iterator[Descriptor]:
    """A file for a few uses, closed afterwards."""
    file = Descriptor(path, flags, mode)
    try:
        yield file
    finally:
        file.close()


class OwnSocket(socket.socket):
    """A socket that sends, receives and closes only while its number is its own; it cannot be had back."""

    def __init__(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> None:
        low = socket.socket(family, kind, protocol)
        number, self._identity = _lift(low.detach())
        super().__init__(family, kind, protocol, fileno=number)

    def is_ours(self) -> bool:
        """Whether the descriptor is still this socket."""
        return self.fileno() >= 0 and identity(self.fileno()) == self._identity

    def _sure(self) -> None:
        if not self.is_ours():
            raise ConnectionResetError(errno.EBADF, "the program closed our socket")

    def settimeout(self, value: float | None) -> None:
        self._sure()
        super().settimeout(value)

    def setblocking(self, flag: bool) -> None:
        self._sure()
        super().setblocking(flag)

    def connect(self, address: Any) -> None:
        self._sure()
        super().connect(address)

    def send(self, data: Any, flags: int = 0) -> int:
        self._sure()
        return super().send(data, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._sure()
        super().sendall(data, flags)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        self._sure()
        return super().recv(bufsize, flags)

    def shutdown(self, how: int) -> None:
        self._sure()
        super().shutdown(how)

    def close(self) -> None:
        if self.fileno() < 0 or self.is_ours():
            super().close()
        else:
            self.detach()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Bell:
    """Wakes a thread that polls: one pipe, of which both ends are ours."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] = (-1, -1)
        self._identity: Identity | None = None
        self._hang()

    def fileno(self) -> int:
        """To poll; called by the thread that waits, which gets a new pipe when the program has closed the old one."""
        if not self._is_ours(0) or not self._is_ours(1):
            self.close()
            self._hang()
        return self._ends[0]

    def ring(self) -> None:
        """Wake it, if the pipe is there; called by any thread, waits for nothing."""
        with contextlib.suppress(OSError):
            if self._is_ours(1):
                os.write(self._ends[1], b"\0")

    def clear(self) -> None:
        """It is awake."""
        with contextlib.suppress(OSError):
            if self._is_ours(0):
                os.read(self._ends[0], 4096)

    def close(self) -> None:
        """Let go of both ends."""
        for end in (0, 1):
            if self._is_ours(end):
                os.close(self._ends[end])
        self._ends = (-1, -1)

    def _hang(self) -> None:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        read, self._identity = _lift(read)
        write, _ = _lift(write)
        self._ends = (read, write)

    def _is_ours(self, end: int) -> bool:
        return self._ends[end] >= 0 and identity(self._ends[end]) == self._identity


def _bytes(data: Any) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _of(seen: os.stat_result) -> Identity:
    return seen.st_dev, seen.st_ino, stat.S_IFMT(seen.st_mode)


def _lift(low: int) -> tuple[int, Identity]:
    """Move a new descriptor to a high number, where there is room, and say which file it is."""
    found = identity(low)
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        floor = _HIGH if limit in (-1, resource.RLIM_INFINITY) else min(_HIGH, limit // 2)
        number = low if low >= floor else fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, floor)
    except OSError:
        number = low  # no room there
    if number != low and identity(low) == found:
        os.close(low)
    if found is None or identity(number) != found:
        if number != low:
            os.close(number)
        raise OSError(errno.EBADF, "the program closed it while it was opened")
    return number, found
