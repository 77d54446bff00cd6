"""Small files that are replaced as a whole: a reader sees the old content or the new, whenever the writer is killed."""

from __future__ import annotations

import os
from pathlib import Path


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
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        try:
            file.write(content)
            file.close()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def is_unfinished(name: str, of: str) -> bool:
    """Whether a file of this name is one that is being written, to become `of`."""
    return name.startswith(f".{of}.") and name.endswith(".tmp")
