"""Small files, read as what others wrote and replaced as a whole.

A file that is read may be anything: a pipe that nobody writes to, a device without an end, a gigabyte. `read_file` refuses all that is
no regular file of a sensible size, at once. Of a file that is replaced a reader sees the old content or the new, whenever the writer is killed.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from proctor.invariants.descriptor import opened

# What decoders of JSON and TOML raise: wrong shape, wrong syntax, no UTF-8 (all `ValueError`, but msgspec's), nested too deeply.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file; a link is followed.
        limit: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger; `strerror` says which.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {_size(limit)}", str(path))
        chunks: list[bytes] = []
        left = limit + 1  # it may grow while it is read
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
        if left <= 0:
            raise OSError(errno.EFBIG, f"larger than {_size(limit)}", str(path))
        return b"".join(chunks)


def open_file(path: Path) -> FileIO:
    """A regular file, to be read in parts: an archive.

    Raises:
        OSError: it cannot be read, or is no regular file; `strerror` says which.
    """
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    except ValueError:  # a name with a zero byte
        raise OSError(errno.EINVAL, "no name of a file", repr(str(path))) from None
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a directory, not a file", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _size(limit: int) -> str:
    return f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB" if limit >= 1 << 10 else f"{limit} bytes"


_CHUNK: Final = 1 << 22


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a whole file or none of it; a link at `path` is replaced, never followed.

    Args:
        path: in a folder that is there.
        content: of the file.
        mode: of a new file, before the umask.

    Raises:
        OSError: it cannot be written, or `path` is a folder; what was there stays, and nothing else is left.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
        try:
            file.write(content, 0)
            file.close()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def is_unfinished(name: str, of: str) -> bool:
    """Whether a file of this name is one that is being written, to become `of`."""
    return name.startswith(f".{of}.") and name.endswith(".tmp")
