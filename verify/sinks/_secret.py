"""Secrets by reference: what a configuration holds is where a secret lies, never the secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from proctor.invariants.files import read_file

_MOST_BYTES: Final = 64 * 1024


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret in an environment variable or a file; read when it is used, so that a rotated one counts.

    Args:
        env: name of the variable.
        file: path of the file; white space around its content is dropped.
    """

    env: str = ""
    file: str = ""

    @property
    def place(self) -> str:
        """Where it lies, to be shown."""
        return f"environment variable {self.env}" if self.env else f"file {self.file}"

    @property
    def exposed(self) -> bool:
        """Whether it lies in a file that every user of this host can read."""
        if self.env:
            return False
        try:
            return bool(os.stat(self.file).st_mode & stat.S_IROTH)
        except (OSError, ValueError):
            return False

    def read(self) -> str:
        """The secret. Raises `ValueError`, without the secret, when it cannot be read or is empty."""
        if self.env:
            value = os.environ.get(self.env, "")
            if not value.strip():
                raise ValueError(f"the {self.place} is not set" if self.env not in os.environ else f"the {self.place} is empty")
        else:
            try:
                value = read_file(Path(self.file), _MOST_BYTES).decode()
            except OSError as error:
                raise ValueError(f"the {self.place} cannot be read: {error.strerror or error}") from None
            except UnicodeDecodeError:
                raise ValueError(f"the {self.place} is not text") from None
        value = value.strip()
        if not value:
            raise ValueError(f"the {self.place} is empty")
        if any(ord(c) < 32 or ord(c) == 127 for c in value):
            raise ValueError(f"the {self.place} holds more than one line, or control characters")
        return value
